// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <c10/util/intrusive_ptr.h>

#include "pagoda/base/error.h"

namespace c10d {
class Store;
}

namespace pagoda::torch {

/// The store fails: the process that has it is gone, or silent.
class StoreLost : public EngineError {
 public:
  explicit StoreLost(std::optional<std::chrono::milliseconds> silence = std::nullopt,
                     std::source_location where = std::source_location::current());

  /// For how long it has not answered; nothing: it is gone.
  const std::optional<std::chrono::milliseconds>& silence() const noexcept { return silence_; }

 private:
  std::optional<std::chrono::milliseconds> silence_;
};

/// A c10d store as a World's board: a call comes back, or throws, within a set time even if the
/// process or the machine that holds the store has frozen. A c10d client has no time-out for that,
/// so a thread of the board's own does the calls, and is left behind if it gets stuck.
///
/// put() and get() may be called from any thread.
class StoreBoard {
 public:
  /// `store` is a connection that nobody else waits on.
  StoreBoard(c10::intrusive_ptr<::c10d::Store> store, std::chrono::milliseconds patience);
  StoreBoard(const StoreBoard&) = delete;
  StoreBoard& operator=(const StoreBoard&) = delete;
  ~StoreBoard();

  /// Calls from now on wait no longer.
  void set_patience(std::chrono::milliseconds patience) noexcept { patience_.store(patience); }

  /// StoreLost if the store fails or does not answer; then every later call throws at once.
  void put(std::string_view key, std::string_view value);
  std::optional<std::string> get(std::string_view key);

 private:
  struct State;
  using Answer = std::optional<std::string>;

  Answer ask(std::function<Answer(::c10d::Store&)> question);
  static void serve(const std::shared_ptr<State>& state);

  std::atomic<std::chrono::milliseconds> patience_;
  const std::shared_ptr<State> state_;  // the thread has its own share
};

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "pagoda/comm/group.h"

namespace pagoda::comm {

/// The ranks that train together, and where they can leave each other notes.
///
/// make_group() is a collective: all ranks call it in the same order, from one thread at a time.
/// The board may be used from any thread; no call on it waits for a rank to do anything. The world
/// outlives its groups.
class World {
 public:
  World() = default;
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  virtual ~World() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// All ranks, connected anew. `name` is for messages and traces; it is the same on every rank.
  virtual std::unique_ptr<Group> make_group(std::string name) = 0;

  /// This rank will make no group any more: others that wait for it in make_group() or
  /// finish_join() throw the story, which says whose it is.
  virtual void give_up(std::string_view /*story*/) noexcept {}

  /// Puts a value on the board, in the place of an earlier one. EngineError if the board is lost.
  virtual void put(std::string_view key, std::string_view value) = 0;
  /// What the board has under `key` now.
  virtual std::optional<std::string> get(std::string_view key) = 0;
  /// 0, 1, 2, …: for names on the board. Ranks that ask in the same order get the same numbers.
  unsigned next_number() noexcept { return next_number_.fetch_add(1); }
  /// This rank begins to join the others for a new engine: all that make_group() and finish_join()
  /// wait for from now on has `limit` together. After `patience` a warning names a rank that has
  /// not come.
  virtual void begin_join(std::chrono::milliseconds /*patience*/,
                          std::chrono::milliseconds /*limit*/) {}
  /// The end of a join: `call`, which may wait for the others in groups of this world, in what is
  /// left of its time. `end` makes it throw.
  virtual void finish_join(const std::function<void()>& call,
                           const std::function<void(const std::string& why)>& /*end*/) {
    call();
  }
  /// From now on no call on the board waits longer than this for an answer.
  virtual void limit_waits(std::chrono::milliseconds /*limit*/) {}
  /// The process of that rank is gone: nothing that ends here waits for it.
  virtual void lost(int /*rank*/) noexcept {}
  /// The rank whose process holds the board, and takes it along when it dies; -1 if none does.
  virtual int board_rank() const noexcept { return -1; }

 private:
  std::atomic<unsigned> next_number_ = 0;
};

}  // namespace pagoda::comm

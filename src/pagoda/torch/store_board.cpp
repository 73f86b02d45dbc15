// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/store_board.h"

#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/torch/quiet_torch_log.h"

namespace pagoda::torch {

StoreLost::StoreLost(std::optional<std::chrono::milliseconds> silence, std::source_location where)
    : EngineError(silence
                      ? fmt::format("the store at which the ranks meet has not answered for {} s",
                                    static_cast<double>(silence->count()) / 1000)
                      : "the connection to the store at which the ranks meet was lost",
                  {}, where),
      silence_(silence) {}

struct StoreBoard::State {
  struct Question {
    std::function<Answer(::c10d::Store&)> ask;
    bool done = false;  // guarded by mutex, as the rest
    Answer answer;
    std::exception_ptr error;
  };

  c10::intrusive_ptr<::c10d::Store> store;  // the thread's
  RankedMutex<LockRank::StoreBoard> mutex;
  Condition wake;                                   // the thread: there is a question
  Condition answered;                               // who asked
  std::deque<std::shared_ptr<Question>> questions;  // guarded by mutex
  bool stopping = false;                            // guarded by mutex
  std::optional<StoreLost> lost;                    // guarded by mutex: why nobody answers any more
  std::thread thread;                               // the board's
};

StoreBoard::StoreBoard(c10::intrusive_ptr<::c10d::Store> store, std::chrono::milliseconds patience)
    : patience_(patience), state_(std::make_shared<State>()) {
  state_->store = std::move(store);
  state_->thread = start_thread([state = state_] { serve(state); });
}

StoreBoard::~StoreBoard() {
  bool stuck = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    stuck = state_->lost.has_value();
  }
  state_->wake.notify_all();
  if (stuck) {
    state_->thread.detach();
  } else {
    state_->thread.join();
  }
}

void StoreBoard::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->wake.wait(lock, [&] { return state->stopping || !state->questions.empty(); });
    if (state->stopping) return;
    const std::shared_ptr<State::Question> question = state->questions.front();
    state->questions.pop_front();
    lock.unlock();
    Answer answer;
    std::exception_ptr error;
    try {
      answer = question->ask(*state->store);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    question->answer = std::move(answer);
    question->error = error;
    question->done = true;
    state->answered.notify_all();
  }
}

StoreBoard::Answer StoreBoard::ask(std::function<Answer(::c10d::Store&)> question) {
  require_may_wait();
  auto asked = std::make_shared<State::Question>();
  asked->ask = std::move(question);
  QuietTorchLog of_what_we_report;
  std::unique_lock lock(state_->mutex);
  if (state_->lost) throw *state_->lost;
  state_->questions.push_back(asked);
  state_->wake.notify_one();
  const std::chrono::milliseconds patience = patience_.load();
  // Whoever asks with less patience finds out for all.
  state_->answered.wait_for(lock, patience, [&] { return asked->done || state_->lost; });
  if (!asked->done) {
    if (!state_->lost) {
      state_->lost = StoreLost(patience);
      of_what_we_report.linger();
    }
    state_->answered.notify_all();
    throw *state_->lost;
  }
  if (asked->error == nullptr) return std::move(asked->answer);
  lock.unlock();
  try {
    std::rethrow_exception(asked->error);
  } catch (const std::exception& error) {
    log::debug("comm", "a call on the store failed", {{"cause", error.what()}});
  }
  throw StoreLost();
}

void StoreBoard::put(std::string_view key, std::string_view value) {
  ask([name = std::string(key), bytes = std::vector<std::uint8_t>(value.begin(), value.end())](
          ::c10d::Store& store) -> Answer {
    store.set(name, bytes);
    return std::nullopt;
  });
}

std::optional<std::string> StoreBoard::get(std::string_view key) {
  return ask([name = std::string(key)](::c10d::Store& store) -> Answer {
    if (!store.check({name})) return std::nullopt;  // get() would wait for it
    const std::vector<std::uint8_t> value = store.get(name);
    return std::string(value.begin(), value.end());
  });
}

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/store_board.h"

#include <cstdint>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "pagoda/base/error.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"

namespace pagoda::torch {

struct StoreBoard::State {
  struct Question {
    std::function<Answer(::c10d::Store&)> ask;
    std::promise<Answer> answer;
  };

  c10::intrusive_ptr<::c10d::Store> store;  // the thread's
  RankedMutex<LockRank::StoreBoard> mutex;
  Condition wake;
  std::deque<Question> questions;  // guarded by mutex
  bool stopping = false;           // guarded by mutex
  std::string lost;                // guarded by mutex: why nobody answers any more
  std::thread thread;              // the board's
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
    stuck = !state_->lost.empty();
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
    State::Question question = std::move(state->questions.front());
    state->questions.pop_front();
    lock.unlock();
    try {
      question.answer.set_value(question.ask(*state->store));
    } catch (...) {
      question.answer.set_exception(std::current_exception());
    }
    lock.lock();
  }
}

StoreBoard::Answer StoreBoard::ask(std::function<Answer(::c10d::Store&)> question) {
  require_may_wait();
  std::future<Answer> answer;
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->lost.empty()) throw EngineError(state_->lost);
    state_->questions.push_back({std::move(question), {}});
    answer = state_->questions.back().answer.get_future();
  }
  state_->wake.notify_one();
  const std::chrono::milliseconds patience = patience_.load();
  if (answer.wait_for(patience) != std::future_status::ready) {
    const std::lock_guard lock(state_->mutex);
    state_->lost = fmt::format("the store has not answered for {} s",
                               static_cast<double>(patience.count()) / 1000);
    throw EngineError(state_->lost);
  }
  try {
    return answer.get();
  } catch (const std::exception& error) {
    const std::string text = error.what();  // torch adds a stack trace to the first line
    throw EngineError(fmt::format("the store failed: {}", text.substr(0, text.find('\n'))));
  }
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

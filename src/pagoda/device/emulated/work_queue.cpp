// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/emulated/work_queue.h"

#include <utility>

#include "pagoda/base/log.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"

namespace pagoda::device::emulated {

WorkQueue::WorkQueue(std::string name)
    : state_(std::make_shared<State>(std::move(name))),
      thread_(start_thread([state = state_] { run(state); })) {}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void WorkQueue::push(Work work) {
  const std::lock_guard lock(state_->mutex);
  state_->waiting.push_back(std::move(work));
  ++state_->pushed;
  state_->changed.notify_all();
}

bool WorkQueue::idle() const {
  const std::lock_guard lock(state_->mutex);
  return state_->finished == state_->pushed;
}

void WorkQueue::drain() {
  std::unique_lock lock(state_->mutex);
  const std::size_t target = state_->pushed;
  state_->changed.wait(lock, [&] { return state_->finished >= target; });
}

std::exception_ptr WorkQueue::take_failure() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->failure, nullptr);
}

void WorkQueue::run(const std::shared_ptr<State>& state) {
  trace::name_thread(state->name);
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->stopping || !state->waiting.empty(); });
    if (state->waiting.empty()) break;
    Work work = std::move(state->waiting.front());
    state->waiting.pop_front();
    std::exception_ptr failure = state->failure;
    const bool failed_before = failure != nullptr;
    lock.unlock();
    work(failure);
    work = nullptr;  // may free blocks, and so push to this very queue
    lock.lock();
    if (!failed_before && failure) state->failure = std::move(failure);
    ++state->finished;
    state->changed.notify_all();
  }
  if (state->failure) {
    log::error("device", "a failure was never looked at", {{"stream", state->name}});
  }
}

}  // namespace pagoda::device::emulated

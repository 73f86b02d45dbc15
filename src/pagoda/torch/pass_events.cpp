// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/pass_events.h"

#include <utility>

namespace pagoda::torch {

PassEvents::PassEvents(Handlers handlers) : handlers_(std::move(handlers)) {}

/// The engine stays while one lives, unless it had ended before.
class PassEvents::Call {
 public:
  explicit Call(PassEvents& events) : events_(events) {
    const std::lock_guard lock(events_.mutex_);
    ended_ = events_.ended_;
    ++events_.calls_;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    const std::lock_guard lock(events_.mutex_);
    if (--events_.calls_ == 0) events_.changed_.notify_all();
  }
  bool ended() const noexcept { return ended_; }

 private:
  PassEvents& events_;
  bool ended_;
};

void PassEvents::function_ended(const CustomFunctions::Pages* pages) noexcept {
  if (const Call call(*this); !call.ended()) handlers_.function_ended(pages);
}

void PassEvents::pass_ended(int pass) {
  const Call call(*this);
  if (!call.ended() && close(pass, false)) handlers_.micro_batch_ended();
}

void PassEvents::pass_failed(int pass) noexcept {
  (void)close(pass, true);
}

void PassEvents::end() {
  RankedLock<LockRank::PlainPasses> lock(mutex_);
  ended_ = true;
  changed_.wait(lock, [&] { return calls_ == 0; });
}

/// False: another pass, inside that one, or the engine's own.
bool PassEvents::close(int pass, bool with_error) {
  const std::lock_guard lock(mutex_);
  if (pass != micro_batch_) return false;
  micro_batch_ = kNoPass;
  failed_ = failed_ || with_error;
  return true;
}

int PassEvents::micro_batch() const {
  const std::lock_guard lock(mutex_);
  return micro_batch_;
}

bool PassEvents::join(const std::function<void()>& begins) {
  const std::lock_guard lock(mutex_);
  if (micro_batch_ == kNoPass) {
    micro_batch_ = Passes::instance().listen(weak_from_this());
    begins();
  }
  return std::exchange(failed_, false);
}

bool PassEvents::take_failure_of_last() {
  const std::lock_guard lock(mutex_);
  return micro_batch_ == kNoPass && std::exchange(failed_, false);
}

bool PassEvents::take_failure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failed_, false);
}

bool PassEvents::take_failure_of_all() {
  const std::lock_guard lock(mutex_);
  const bool unended = std::exchange(micro_batch_, kNoPass) != kNoPass;
  return std::exchange(failed_, false) || unended;
}

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/transfer.h"

#include <utility>

namespace pagoda::io {

TransferState::TransferState(std::shared_ptr<ErrorLatch> latch, TransferCallback callback)
    : latch_(std::move(latch)), callback_(std::move(callback)) {}

void TransferState::begin(std::size_t pieces, std::shared_ptr<TransferState> self) {
  pending_.store(pieces, std::memory_order_relaxed);
  self_ = std::move(self);
}

void TransferState::piece_ended(std::exception_ptr error) noexcept {
  if (error != nullptr) {
    const std::lock_guard lock(mutex_);
    ++errors_;
    if (error_ == nullptr) error_ = std::move(error);
  }
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish();
}

void TransferState::finish() noexcept {
  const std::shared_ptr<TransferState> alive = std::move(self_);
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = error_;
    if (callback_ != nullptr) observed_ = true;
  }
  if (callback_ != nullptr) {
    try {
      callback_(error);
    } catch (...) {
      latch_->set(std::current_exception());
    }
  }
  ended();
  bool lost = false;
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    lost = abandoned_ && error_ != nullptr && !observed_;
    ended_.notify_all();
  }
  if (lost) latch_->set(std::move(error));
}

void TransferState::wait_done() {
  if (done()) return;
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return done_.load(std::memory_order_relaxed); });
}

std::exception_ptr TransferState::observe() {
  const std::lock_guard lock(mutex_);
  observed_ = true;
  return error_;
}

std::size_t TransferState::error_count() const {
  const std::lock_guard lock(mutex_);
  return errors_;
}

void TransferState::abandon() noexcept {
  std::exception_ptr lost;
  {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    if (done_.load(std::memory_order_relaxed) && !observed_) lost = error_;
  }
  if (lost != nullptr) latch_->set(std::move(lost));
}

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  if (this != &other) {
    forget(true);
    state_ = std::move(other.state_);
    owner_ = other.owner_;
  }
  return *this;
}

Transfer::~Transfer() {
  forget(true);
}

void Transfer::wait() {
  if (state_ == nullptr) return;
  owner_.require("a transfer");
  state_->wait_done();
  if (const std::exception_ptr error = state_->observe()) std::rethrow_exception(error);
}

void Transfer::detach() && noexcept {
  forget(false);
}

void Transfer::forget(bool wait) noexcept {
  if (state_ == nullptr) return;
  if (!owner_.here()) {
    // A condition variable that others waited on at the fork cannot be destroyed: leak it.
    static_cast<void>(new std::shared_ptr<TransferState>(std::move(state_)));
    return;
  }
  if (wait) state_->wait_done();
  state_->abandon();
  state_.reset();
}

}  // namespace pagoda::io

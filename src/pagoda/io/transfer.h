// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/io/error_latch.h"
#include "pagoda/io/owner_process.h"

namespace pagoda::io {

/// Called once when a transfer has ended, with its first error or null, on a thread of an engine.
/// It must not wait for transfers, nor drop one that runs; it may start some. What it throws is
/// latched in the space.
using TransferCallback = std::function<void(std::exception_ptr error)>;

/// What a Transfer and its pieces share. Any thread may call it.
class TransferState {
 public:
  TransferState(std::shared_ptr<ErrorLatch> latch, TransferCallback callback);
  TransferState(const TransferState&) = delete;
  TransferState& operator=(const TransferState&) = delete;
  virtual ~TransferState() = default;

  /// Before the first piece starts. `self` keeps the state alive until the last has ended.
  void begin(std::size_t pieces, std::shared_ptr<TransferState> self);
  /// A piece has ended; with the last one the transfer has. The caller may be gone afterwards.
  void piece_ended(std::exception_ptr error) noexcept;

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  void wait_done();
  /// The first error; null while running or when all went well. The caller has seen it.
  std::exception_ptr observe();
  std::size_t error_count() const;
  /// The handle is gone: an error that was not observed goes to the latch, now or when it comes.
  void abandon() noexcept;

 protected:
  /// The last piece has ended: gives back what only a running transfer needs.
  virtual void ended() noexcept {}

 private:
  void finish() noexcept;

  const std::shared_ptr<ErrorLatch> latch_;
  const TransferCallback callback_;
  std::atomic<std::size_t> pending_{0};
  std::atomic<bool> done_{false};
  mutable RankedMutex<LockRank::Transfer> mutex_;
  Condition ended_;
  std::exception_ptr error_;             // guarded by mutex_
  std::size_t errors_ = 0;               // guarded by mutex_
  bool observed_ = false;                // guarded by mutex_
  bool abandoned_ = false;               // guarded by mutex_
  std::shared_ptr<TransferState> self_;  // set by begin(), taken by finish()
};

/// A transfer under way. Move-only.
///
/// One thread at a time may use a handle. The memory given to the transfer is the engine's until it
/// has ended, so the destructor waits; it does not throw: an error nobody has seen is thrown by the
/// next call on the SwapSpace. In a forked child wait() throws and the destructor forgets.
class [[nodiscard]] Transfer {
 public:
  /// Done, without error.
  Transfer() = default;
  explicit Transfer(std::shared_ptr<TransferState> state) noexcept : state_(std::move(state)) {}
  Transfer(Transfer&&) noexcept = default;
  Transfer& operator=(Transfer&& other) noexcept;
  ~Transfer();

  /// Returns when all bytes have moved and the callback has run, or throws the first error, each
  /// time it is called. Not from a callback.
  void wait();
  /// Whether wait() would return at once.
  bool done() const noexcept { return state_ == nullptr || state_->done(); }
  /// How many of its requests failed; wait() throws the first.
  std::size_t error_count() const { return state_ != nullptr ? state_->error_count() : 0; }
  /// Lets it run on its own: the caller keeps the memory alive until the callback has been called.
  void detach() && noexcept;

 private:
  void forget(bool wait) noexcept;

  std::shared_ptr<TransferState> state_;  // null: nothing under way
  OwnerProcess owner_;
};

}  // namespace pagoda::io

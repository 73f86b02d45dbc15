// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>
#include <type_traits>
#include <utility>

#include "pagoda/base/lock_rank.h"

/// Mutexes whose order is checked. Where PAGODA_CHECK_LOCKS is set (the builds with sanitizers), a
/// thread that takes a lock out of order, or waits for a condition under a lock that others need
/// meanwhile, ends the process with both names. Otherwise they are the standard library's.
namespace pagoda {

#ifdef PAGODA_CHECK_LOCKS

/// The locks that this thread holds.
namespace held_locks {
void require_order(LockRank rank, const void* mutex, bool recursive) noexcept;
void push(LockRank rank, const void* mutex) noexcept;
void pop(const void* mutex) noexcept;
/// Of all but `but`, which the wait gives back.
void require_may_wait(const void* but) noexcept;
}  // namespace held_locks

template <LockRank rank, class Base>
class CheckedMutex {
 public:
  constexpr CheckedMutex() = default;
  CheckedMutex(const CheckedMutex&) = delete;
  CheckedMutex& operator=(const CheckedMutex&) = delete;

  void lock() {
    held_locks::require_order(rank, this, std::is_same_v<Base, std::recursive_mutex>);
    base_.lock();
    held_locks::push(rank, this);
  }
  void unlock() {
    held_locks::pop(this);
    base_.unlock();
  }

 private:
  Base base_;
};

/// Whoever waits holds no other lock, but for those that may be held meanwhile.
class CheckedCondition {
 public:
  void notify_one() noexcept { base_.notify_one(); }
  void notify_all() noexcept { base_.notify_all(); }

  template <class Lock>
  void wait(Lock& lock) {
    held_locks::require_may_wait(lock.mutex());
    base_.wait(lock);
  }
  template <class Lock, class Predicate>
  void wait(Lock& lock, Predicate predicate) {
    while (!predicate()) wait(lock);
  }
  template <class Lock, class Duration>
  std::cv_status wait_for(Lock& lock, const Duration& duration) {
    held_locks::require_may_wait(lock.mutex());
    return base_.wait_for(lock, duration);
  }
  template <class Lock, class Duration, class Predicate>
  bool wait_for(Lock& lock, const Duration& duration, Predicate predicate) {
    if (predicate()) return true;
    held_locks::require_may_wait(lock.mutex());
    return base_.wait_for(lock, duration, predicate);
  }

 private:
  std::condition_variable_any base_;
};

template <LockRank rank>
using RankedMutex = CheckedMutex<rank, std::mutex>;
template <LockRank rank>
using RankedRecursiveMutex = CheckedMutex<rank, std::recursive_mutex>;
using Condition = CheckedCondition;

/// Whoever calls this may wait for other threads: no lock is held that these could need.
inline void require_may_wait() noexcept {
  held_locks::require_may_wait(nullptr);
}

#else

template <LockRank>
using RankedMutex = std::mutex;
template <LockRank>
using RankedRecursiveMutex = std::recursive_mutex;
using Condition = std::condition_variable;

inline void require_may_wait() noexcept {}

#endif

template <LockRank rank>
using RankedGuard = std::lock_guard<RankedMutex<rank>>;
template <LockRank rank>
using RankedLock = std::unique_lock<RankedMutex<rank>>;

}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/pager/page_record.h"

namespace pagoda::pager {

/// Pages whose storage has died, until they can go. Storages die on any thread, Python's lock held
/// or not: whoever holds this one waits for nobody.
class DeadPages {
 public:
  /// For so many pages, so that add() need not ask for memory.
  void make_room(std::size_t pages) {
    const std::lock_guard lock(mutex_);
    if (dead_.capacity() < pages) dead_.reserve(2 * pages);
  }

  void add(PageRecord& page) noexcept {
    const std::lock_guard lock(mutex_);
    dead_.push_back(&page);
    any_.store(true, std::memory_order_release);
  }

  /// It has a storage again.
  void forget(const PageRecord& page) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase(dead_, &page);
  }

  bool empty() const noexcept { return !any_.load(std::memory_order_acquire); }

  /// Forgets those for which `went` returns true.
  template <class Went>
  void remove_if(const Went& went) {
    if (empty()) return;
    const std::lock_guard lock(mutex_);
    std::erase_if(dead_, [&](PageRecord* page) { return went(*page); });
    any_.store(!dead_.empty(), std::memory_order_release);
  }

 private:
  std::atomic<bool> any_{false};
  RankedMutex<LockRank::DeadPages> mutex_;
  std::vector<PageRecord*> dead_;  // guarded by mutex_
};

}  // namespace pagoda::pager

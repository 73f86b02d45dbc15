// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace pagoda::torch {

/// While one lives, StorageTable shows half of an exchange: a storage is about to stand for another
/// page. Whoever looks for the pages of an operator waits until none lives, and looks again if one
/// has lived since. Any number of threads; none waits for room or for TableUse meanwhile.
class TableChange {
 public:
  TableChange() noexcept { state().fetch_add(kOne, std::memory_order_acq_rel); }
  TableChange(const TableChange&) = delete;
  TableChange& operator=(const TableChange&) = delete;
  ~TableChange() {
    state().fetch_add(kOver - kOne, std::memory_order_acq_rel);
    state().notify_all();
  }

  /// Returns when none lives: the moment of a look that begins.
  static std::uint64_t wait_for_none() noexcept {
    std::uint64_t now = state().load(std::memory_order_acquire);
    while ((now & kLiving) != 0) {
      state().wait(now, std::memory_order_acquire);
      now = state().load(std::memory_order_acquire);
    }
    return now;
  }
  /// Whether none has lived since then: all that was found is of one moment.
  static bool none_since(std::uint64_t moment) noexcept {
    return state().load(std::memory_order_acquire) == moment;
  }
  /// In a forked child, which has none of the threads that had one.
  static void forget_all() noexcept { state().store(0, std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t kOne = 1;                        // of those that live
  static constexpr std::uint64_t kOver = std::uint64_t{1} << 16;  // of those that have lived
  static constexpr std::uint64_t kLiving = kOver - 1;

  static std::atomic<std::uint64_t>& state() noexcept {
    static std::atomic<std::uint64_t> value{0};
    return value;
  }
};

}  // namespace pagoda::torch

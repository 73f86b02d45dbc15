// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace pagoda::torch {

/// A thread that uses what it has found in StorageTable or ParameterTable, until it has pinned the
/// page: whoever erases an entry waits for those before what it points at goes. Only operators that
/// have found something pay for it. One thread.
class TableUse {
 public:
  TableUse() = default;
  TableUse(const TableUse&) = delete;
  TableUse& operator=(const TableUse&) = delete;
  ~TableUse() { leave(); }

  /// True if it begins now: what was found before may be gone, and is to be looked for again.
  bool enter() noexcept {
    if (lane_) return false;
    lane_ = turn().load(std::memory_order_relaxed);
    count(*lane_).fetch_add(1, std::memory_order_acq_rel);
    ++mine()[*lane_];
    return true;
  }
  void leave() noexcept {
    if (!lane_) return;
    auto& users = count(*lane_);
    --mine()[*lane_];
    lane_.reset();
    if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) users.notify_all();
  }

  /// After entries were erased: returns when nobody uses them any more. Not for a thread that uses
  /// one itself.
  static void wait_for_all() noexcept {
    // Newcomers count in the other lane, so that each runs empty. Each is looked at by everybody
    // who waits, however many do at once: they may delay each other, and no more.
    for (const std::uint32_t lane : {0U, 1U}) {
      turn().store(1U - lane, std::memory_order_relaxed);
      auto& users = count(lane);
      // A change of it, not a look at it: who comes later sees what was erased.
      while (const std::uint32_t now = users.fetch_add(0, std::memory_order_acq_rel)) {
        users.wait(now, std::memory_order_acquire);
      }
    }
  }
  /// The same for threads that cannot wait, and ask again and again instead. Made after the entries
  /// were erased.
  class Grace {
   public:
    /// Whether nobody but the calling thread uses them any more.
    bool gone() noexcept {
      // As above, a lane at a time: who has come since counts in the other one, or found nothing.
      for (; lane_ < 2; ++lane_) {
        turn().store(1U - lane_, std::memory_order_relaxed);
        if (count(lane_).fetch_add(0, std::memory_order_acq_rel) != mine()[lane_]) return false;
      }
      return true;
    }

   private:
    std::uint32_t lane_ = 0;
  };
  /// In a forked child, which has none of the threads that were in one.
  static void forget_all() noexcept {
    count(0).store(0, std::memory_order_relaxed);
    count(1).store(0, std::memory_order_relaxed);
    mine() = {};
  }

 private:
  static std::atomic<std::uint32_t>& turn() noexcept {
    static std::atomic<std::uint32_t> value{0};
    return value;
  }
  static std::atomic<std::uint32_t>& count(std::size_t lane) noexcept {
    struct alignas(64) Count {
      std::atomic<std::uint32_t> users{0};
    };
    static std::array<Count, 2> counts;
    return counts[lane].users;
  }

  /// How many this thread has begun, by lane.
  static std::array<std::uint32_t, 2>& mine() noexcept {
    static thread_local std::array<std::uint32_t, 2> uses{};
    return uses;
  }

  std::optional<std::uint32_t> lane_;
};

}  // namespace pagoda::torch

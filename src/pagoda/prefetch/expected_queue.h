// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pagoda/prefetch/touch.h"

namespace pagoda::prefetch {

/// The touches that are expected next, in order, and for each page where it comes first.
///
/// Everything but truncate() takes constant time. One thread at a time.
class ExpectedQueue {
 public:
  /// Holds up to `horizon` touches.
  explicit ExpectedQueue(std::size_t horizon);

  std::size_t size() const noexcept { return static_cast<std::size_t>(end_ - begin_); }
  bool full() const noexcept { return size() == horizon_; }
  /// The i-th touch from now, 0 being the very next; i < size().
  Expected at(std::size_t i) const noexcept;
  PageId page_at(std::size_t i) const noexcept { return slot(begin_ + i).touch.page; }

  /// How many touches from now the page is used, 1 being the very next one.
  std::optional<std::size_t> next_use(PageId page) const noexcept;

  /// Adds a touch at the far end, `gap` after the one before it. Not when full().
  void push(Touch touch, std::uint8_t strength, Nanos gap);
  /// The front one has happened: times count from it now. Not when empty.
  void pop() noexcept;
  /// Forgets all of it; times count from now.
  void clear() noexcept;
  /// Keeps the first `count` touches.
  void truncate(std::size_t count) noexcept;

 private:
  struct Slot {
    Touch touch;
    std::uint8_t strength = 0;
    Nanos due = 0;           // on the queue's own time line
    std::uint64_t next = 0;  // the same page's next position, kNone if none
    std::uint64_t previous = 0;
  };
  struct Uses {
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    std::uint64_t epoch = 0;  // of another epoch: not in the queue
  };
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  Slot& slot(std::uint64_t position) noexcept { return slots_[position & (slots_.size() - 1)]; }
  const Slot& slot(std::uint64_t position) const noexcept {
    return slots_[position & (slots_.size() - 1)];
  }

  std::size_t horizon_;
  std::vector<Slot> slots_;  // a ring, by position
  std::vector<Uses> uses_;   // by page
  std::uint64_t epoch_ = 1;  // clear() starts a new one
  std::uint64_t begin_ = 0;  // positions only grow
  std::uint64_t end_ = 0;
  Nanos now_ = 0;  // the current touch, on the queue's own time line
};

}  // namespace pagoda::prefetch

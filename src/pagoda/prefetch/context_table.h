// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagoda/prefetch/touch.h"

namespace pagoda::prefetch {

/// What followed a context: the next touch and the time until it.
struct Followed {
  Touch next;
  /// Up to kSure: how often in a row it came true. 0: tentative, not used until it comes again.
  std::uint8_t strength = 1;
  /// How many gaps are in the mean, as far as that matters.
  std::uint8_t samples = 1;
  /// Something else followed once: whether it does is decided by a longer context.
  bool ambiguous = false;
  /// Running mean of the time until `next`, in nanoseconds.
  float gap = 0;
  /// Whether the page was there when this was learnt: Predictor::forget() begins another life.
  std::uint32_t life = 0;
};

/// Contexts of one length, by hash, with what followed each: at most `limit` of them, and those
/// that were not confirmed for longest go first.
///
/// Kept as two generations of open addressing. What is confirmed or new goes into the young one;
/// when that holds half of the limit it becomes the old one, and the old one is dropped. So
/// whatever was confirmed within the last limit/2 different contexts is there. Equal hashes are not
/// told apart: the cost is a wrong prediction. One thread at a time.
class ContextTable {
 public:
  explicit ContextTable(std::size_t limit);

  /// Null when the context is unknown. Good until the table changes.
  const Followed* find(std::uint64_t key) const noexcept;
  /// The same, and the context counts as confirmed now.
  Followed* confirm(std::uint64_t key);
  /// Adds or replaces a context.
  void insert(std::uint64_t key, const Followed& followed);

  /// Never more than the limit.
  std::size_t size() const noexcept { return young_.count + old_.count; }

 private:
  struct Slot {
    std::uint64_t key = 0;  // 0: free
    Followed followed;
  };
  struct Generation {
    std::vector<Slot> slots;  // a power of two, at most half full
    std::size_t count = 0;

    Slot* find(std::uint64_t key) noexcept;
    const Slot* find(std::uint64_t key) const noexcept;
    Slot& place(std::uint64_t key) noexcept;
    void grow();
    void clear();
  };

  std::size_t half_;
  Generation young_;
  Generation old_;
};

}  // namespace pagoda::prefetch

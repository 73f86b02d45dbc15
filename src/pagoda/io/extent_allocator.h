// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "pagoda/base/bytes.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::io {

/// Hands out ranges of a fixed space: the smallest hole that fits, holes merged as ranges return.
///
/// Offsets and sizes are multiples of kAlignment. Large ranges are moved in parts, and a part whose
/// ends lie inside checksum blocks is read before it is written: they take whole ones of
/// kLargeAlignment, from the front of a hole, and small ranges go to its back, so that until a
/// range returns large ones are aligned and nothing lies between two of a kind. When no hole has
/// room for an aligned one, an unaligned one is better than none. All members may be called from
/// any thread.
class ExtentAllocator {
 public:
  static constexpr Bytes kAlignment = 4_KiB;
  static constexpr Bytes kLarge = 4_MiB;
  static constexpr Bytes kLargeAlignment = 64_KiB;

  /// What a range of `length` bytes takes: a large one less than 2 % more.
  static constexpr Bytes rounded(Bytes length) noexcept {
    return align_up(length, length < kLarge ? kAlignment : kLargeAlignment);
  }

  struct Stats {
    Bytes capacity = 0;
    Bytes used = 0;
    Bytes largest_hole = 0;
    std::size_t extents = 0;
    std::size_t holes = 0;
  };

  explicit ExtentAllocator(Bytes capacity);

  /// The offset of rounded(length) bytes; nothing when no hole is large enough.
  std::optional<Bytes> allocate(Bytes length);
  /// Returns what allocate(length) gave.
  void free(Bytes offset, Bytes length);

  Stats stats() const;

 private:
  using Lock = RankedGuard<LockRank::Extents>;
  std::optional<Bytes> find(Bytes size, const Lock&) const;
  void add_hole(Bytes offset, Bytes length, const Lock&);
  void remove_hole(std::map<Bytes, Bytes>::iterator hole, const Lock&);

  const Bytes capacity_;
  mutable RankedMutex<LockRank::Extents> mutex_;
  std::map<Bytes, Bytes> holes_;               // guarded by mutex_; offset → length
  std::set<std::pair<Bytes, Bytes>> by_size_;  // guarded by mutex_; (length, offset)
  Bytes used_ = 0;                             // guarded by mutex_
  std::size_t extents_ = 0;                    // guarded by mutex_
};

}  // namespace pagoda::io

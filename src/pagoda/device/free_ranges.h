// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "pagoda/base/bytes.h"
#include "pagoda/device/fence.h"

namespace pagoda::device {

/// Some free bytes of an arena, and who may still be using which of them.
struct FreeRange {
  Bytes offset = 0;
  Bytes bytes = 0;
  Fences fences;
};

/// The free bytes of an arena as offsets: best fit, neighbours joined at once.
///
/// Knows nothing of memory. Not thread-safe: the arena's lock guards it.
class FreeRanges {
 public:
  /// Takes `bytes` from the start of the smallest range that has them, the lowest among equals. The
  /// rest stays free. The result carries the fences of its own bytes only.
  std::optional<FreeRange> take(Bytes bytes);
  /// Gives a range back, joined with its free neighbours. It must not overlap what is free.
  void give(FreeRange range);

  Bytes total() const noexcept { return total_; }
  Bytes largest() const noexcept { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  std::size_t count() const noexcept { return by_offset_.size(); }
  /// Whether `offset` is free.
  bool contains(Bytes offset) const;
  const std::map<Bytes, FreeRange>& all() const noexcept { return by_offset_; }

 private:
  using Ranges = std::map<Bytes, FreeRange>;
  FreeRange extract(Ranges::iterator it);
  void insert(FreeRange range);

  Ranges by_offset_;
  std::set<std::pair<Bytes, Bytes>> by_size_;  // (bytes, offset) of each
  Bytes total_ = 0;
};

}  // namespace pagoda::device

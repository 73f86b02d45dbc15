// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/free_ranges.h"

#include <iterator>

#include "pagoda/base/error.h"

namespace pagoda::device {

std::optional<FreeRange> FreeRanges::take(Bytes bytes) {
  const auto best = by_size_.lower_bound({bytes, 0});
  if (best == by_size_.end()) return std::nullopt;
  FreeRange range = extract(by_offset_.find(best->second));
  if (range.bytes == bytes) return range;
  const Bytes cut = range.offset + bytes;
  const Bytes end = range.offset + range.bytes;
  FreeRange taken{range.offset, bytes, fences_within(range.fences, range.offset, cut)};
  insert({cut, end - cut, fences_within(range.fences, cut, end)});
  return taken;
}

void FreeRanges::give(FreeRange range) {
  const auto next = by_offset_.lower_bound(range.offset);
  const bool has_next = next != by_offset_.end();
  const bool has_previous = next != by_offset_.begin();
  PAGODA_CHECK(!has_next || range.offset + range.bytes <= next->first,
               "the range at {} is free already", range.offset);
  PAGODA_CHECK(
      !has_previous || std::prev(next)->first + std::prev(next)->second.bytes <= range.offset,
      "the range at {} is free already", range.offset);
  const bool joins_next = has_next && range.offset + range.bytes == next->first;
  const bool joins_previous =
      has_previous && std::prev(next)->first + std::prev(next)->second.bytes == range.offset;
  const auto previous = has_previous ? std::prev(next) : by_offset_.end();
  if (joins_next) {
    FreeRange after = extract(next);
    range.bytes += after.bytes;
    add_fences(range.fences, std::move(after.fences));
  }
  if (joins_previous) {
    FreeRange before = extract(previous);
    before.bytes += range.bytes;
    add_fences(before.fences, std::move(range.fences));
    range = std::move(before);
  }
  insert(std::move(range));
}

bool FreeRanges::contains(Bytes offset) const {
  const auto after = by_offset_.upper_bound(offset);
  if (after == by_offset_.begin()) return false;
  const auto& [begin, range] = *std::prev(after);
  return offset < begin + range.bytes;
}

FreeRange FreeRanges::extract(Ranges::iterator it) {
  FreeRange range = std::move(it->second);
  by_size_.erase({range.bytes, range.offset});
  by_offset_.erase(it);
  total_ -= range.bytes;
  return range;
}

void FreeRanges::insert(FreeRange range) {
  by_size_.emplace(range.bytes, range.offset);
  total_ += range.bytes;
  const Bytes offset = range.offset;
  by_offset_.emplace(offset, std::move(range));
}

}  // namespace pagoda::device

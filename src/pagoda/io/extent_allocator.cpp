// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/extent_allocator.h"

#include "pagoda/base/error.h"

namespace pagoda::io {

ExtentAllocator::ExtentAllocator(Bytes capacity) : capacity_(align_down(capacity, kAlignment)) {
  const Lock lock(mutex_);
  if (capacity_ > 0) add_hole(0, capacity_, lock);
}

std::optional<Bytes> ExtentAllocator::allocate(Bytes length) {
  const Lock lock(mutex_);
  if (length > capacity_) return std::nullopt;
  const Bytes size = rounded(length);
  if (size == 0) return 0;
  const std::optional<Bytes> offset = find(size, lock);
  if (!offset) return std::nullopt;
  const auto hole = std::prev(holes_.upper_bound(*offset));
  const auto [begin, hole_length] = *hole;
  remove_hole(hole, lock);
  if (*offset > begin) add_hole(begin, *offset - begin, lock);
  const Bytes rest = begin + hole_length - (*offset + size);
  if (rest > 0) add_hole(*offset + size, rest, lock);
  used_ += size;
  ++extents_;
  return offset;
}

/// Where `size` bytes shall lie, in which hole.
std::optional<Bytes> ExtentAllocator::find(Bytes size, const Lock&) const {
  const auto fit = by_size_.lower_bound({size, 0});
  if (fit == by_size_.end()) return std::nullopt;
  if (size < kLarge) return fit->second + fit->first - size;
  for (auto hole = fit; hole != by_size_.end(); ++hole) {
    const Bytes aligned = align_up(hole->second, kLargeAlignment);
    if (aligned + size <= hole->second + hole->first) return aligned;
  }
  return fit->second;
}

void ExtentAllocator::free(Bytes offset, Bytes length) {
  const Lock lock(mutex_);
  const Bytes size = rounded(length);
  if (size == 0) return;
  PAGODA_CHECK_LE(size, used_, "extent returned twice");
  used_ -= size;
  --extents_;
  Bytes begin = offset;
  Bytes end = offset + size;
  auto after = holes_.lower_bound(offset);
  if (after != holes_.end()) {
    PAGODA_CHECK_LE(end, after->first, "extent returned twice");
    if (after->first == end) {
      end += after->second;
      remove_hole(after++, lock);
    }
  }
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    PAGODA_CHECK_LE(before->first + before->second, begin, "extent returned twice");
    if (before->first + before->second == begin) {
      begin = before->first;
      remove_hole(before, lock);
    }
  }
  add_hole(begin, end - begin, lock);
}

ExtentAllocator::Stats ExtentAllocator::stats() const {
  const Lock lock(mutex_);
  return {.capacity = capacity_,
          .used = used_,
          .largest_hole = by_size_.empty() ? 0 : by_size_.rbegin()->first,
          .extents = extents_,
          .holes = holes_.size()};
}

void ExtentAllocator::add_hole(Bytes offset, Bytes length, const Lock&) {
  holes_.emplace(offset, length);
  by_size_.emplace(length, offset);
}

void ExtentAllocator::remove_hole(std::map<Bytes, Bytes>::iterator hole, const Lock&) {
  by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

}  // namespace pagoda::io

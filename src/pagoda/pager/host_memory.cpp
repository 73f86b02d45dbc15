// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/host_memory.h"

#include <algorithm>
#include <utility>

namespace pagoda::pager {
namespace {

constexpr Bytes kPage = 4096;
// From here on huge pages pay.
constexpr Bytes kHuge = 4_MiB;
// From here on a block is a slab of its own: locking it costs little more than writing it once, and
// nothing is left over at its end.
constexpr Bytes kAlone = 64_MiB;
constexpr Bytes kLargestSlab = 256_MiB;

AlignedBuffer plain_buffer(Bytes bytes) {
  return AlignedBuffer(bytes, bytes < kPage ? 64 : kPage,
                       bytes < kHuge ? AlignedBuffer::Pages::Default : AlignedBuffer::Pages::Huge);
}

}  // namespace

HostMemory::HostMemory(std::shared_ptr<device::Device> device, Budget& budget, Bytes slab)
    : device_(std::move(device)), budget_(budget), slab_bytes_(slab) {}

HostBlock HostMemory::allocate(Bytes bytes, std::string_view tag, std::string_view name) {
  HostBlock out;
  if (bytes == 0) return out;
  if (device_->kind() != device::DeviceKind::Cuda) {
    out.reservation_ = budget_.reserve(bytes, tag);
    out.buffer_ = plain_buffer(bytes);
    return out;
  }
  const std::lock_guard lock(mutex_);
  const Bytes wanted = align_up(bytes, kPage);
  const Bytes slab_bytes = wanted >= kAlone ? wanted : next_slab(tag, wanted);
  if (const auto expected = expected_.find(tag); expected != expected_.end()) {
    expected->second -= std::min(expected->second, wanted);
  }
  for (Slab& slab : slabs_) {
    if (slab.tag != tag) continue;
    if (auto block = slab.arena->try_allocate(bytes, name)) {
      out.block_ = std::move(*block);
      return out;
    }
  }
  // Near the end of the budget slabs that are empty go, and a new one is only as large as what is
  // asked for.
  auto reservation = budget_.try_reserve(slab_bytes, tag);
  if (!reservation) {
    std::erase_if(slabs_, [](const Slab& slab) { return slab.empty(); });
    reservation = budget_.try_reserve(slab_bytes, tag);
  }
  if (!reservation) reservation = budget_.reserve(wanted, tag);
  slabs_.push_back({std::string(tag), std::make_unique<device::PinnedArena>(
                                          device_, std::move(*reservation),
                                          device::ArenaOptions{.name = fmt::format("host {}", tag),
                                                               .alignment = kPage})});
  out.block_ = slabs_.back().arena->allocate(bytes, name);
  return out;
}

void HostMemory::expect(std::string_view tag, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  expected_[std::string(tag)] = bytes;
}

/// Holds mutex_.
Bytes HostMemory::next_slab(std::string_view tag, Bytes wanted) const {
  const auto expected = expected_.find(tag);
  if (expected != expected_.end() && expected->second > 0) {
    return std::max(wanted, std::min(align_up(expected->second, kPage), kLargestSlab));
  }
  Bytes taken = 0;
  for (const Slab& slab : slabs_) {
    if (slab.tag == tag) taken += slab.arena->stats().capacity;
  }
  return std::max({wanted, slab_bytes_, std::min(align_up(taken / 8, kPage), kLargestSlab)});
}

bool HostMemory::fits(Bytes bytes, std::string_view tag) const {
  if (bytes <= budget_.available()) return true;
  const std::lock_guard lock(mutex_);
  Bytes empty = 0;
  for (const Slab& slab : slabs_) empty += slab.empty() ? slab.arena->stats().capacity : 0;
  if (bytes <= budget_.available() + empty) return true;
  return std::any_of(slabs_.begin(), slabs_.end(), [&](const Slab& slab) {
    return slab.tag == tag && slab.arena->stats().largest_free >= bytes;
  });
}

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/budget.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/block.h"
#include "pagoda/device/device.h"
#include "pagoda/device/pinned_arena.h"

namespace pagoda::pager {

/// Host bytes under a budget, given back when the handle goes. Move-only, one owner.
class HostBlock {
 public:
  /// Holds nothing.
  HostBlock() = default;

  std::byte* data() noexcept { return block_ ? block_.data() : buffer_.data(); }
  const std::byte* data() const noexcept { return block_ ? block_.data() : buffer_.data(); }

 private:
  friend class HostMemory;
  Reservation reservation_;  // empty when the slab holds it
  AlignedBuffer buffer_;
  device::Block block_;  // part of a pinned slab
};

/// Hands out the host's bytes: plain memory where the device is the host, page-locked slabs where
/// it is a GPU (locking page by page would cost more than the memory). Any thread may allocate.
class HostMemory {
 public:
  /// Pinned memory is taken in slabs: of `slab` bytes at first, larger ones the more there is, so
  /// that what is left over at their ends stays a small part. Large blocks have one each.
  HostMemory(std::shared_ptr<device::Device> device, Budget& budget, Bytes slab);

  /// Aligned for O_DIRECT from a page of bytes on. BudgetExceeded when the budget is full.
  HostBlock allocate(Bytes bytes, std::string_view tag, std::string_view name);
  /// So many bytes of this kind are about to be asked for: slabs are made for them, not larger.
  void expect(std::string_view tag, Bytes bytes);
  /// Whether allocate() would succeed.
  bool fits(Bytes bytes, std::string_view tag) const;

 private:
  struct Slab {
    std::string tag;
    std::unique_ptr<device::PinnedArena> arena;

    bool empty() const { return arena->stats().blocks == 0; }
  };

  const std::shared_ptr<device::Device> device_;
  Budget& budget_;
  const Bytes slab_bytes_;
  mutable RankedMutex<LockRank::HostMemory> mutex_;
  Bytes next_slab(std::string_view tag, Bytes wanted) const;

  std::vector<Slab> slabs_;                             // guarded by mutex_
  std::map<std::string, Bytes, std::less<>> expected_;  // by tag; guarded by mutex_
};

}  // namespace pagoda::pager

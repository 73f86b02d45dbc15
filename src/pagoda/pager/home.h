// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "pagoda/base/budget.h"
#include "pagoda/device/block.h"
#include "pagoda/io/extent.h"
#include "pagoda/pager/host_memory.h"
#include "pagoda/pager/tier.h"

namespace pagoda::pager {

/// Where some state of a page lives when nobody uses it: bytes at one tier. Move-only; gives them
/// back when it goes. Made by Tiers::allocate(). One owner; its bytes may be moved by any thread.
class Home {
 public:
  /// Holds nothing.
  Home() = default;
  Home(Home&&) noexcept = default;
  Home& operator=(Home&&) noexcept = default;

  explicit operator bool() const noexcept { return exists_; }
  Tier tier() const noexcept { return tier_; }
  Bytes size() const noexcept { return size_; }

  /// The bytes, where the tier is memory; null on NVMe. On the device, only it may touch them.
  std::byte* data() noexcept { return tier_ == Tier::Device ? block_.data() : memory_.data(); }
  const std::byte* data() const noexcept {
    return tier_ == Tier::Device ? block_.data() : memory_.data();
  }
  const io::Extent& extent() const noexcept { return extent_; }
  const device::Block& block() const noexcept { return block_; }

 private:
  friend class Tiers;
  bool exists_ = false;
  Tier tier_ = Tier::Host;
  Bytes size_ = 0;
  HostBlock memory_;
  device::Block block_;
  Reservation space_;  // of the NVMe budget
  Reservation sums_;   // host bytes of the extent's checksums
  io::Extent extent_;
};

}  // namespace pagoda::pager

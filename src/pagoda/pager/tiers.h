// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "pagoda/base/budget.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/device.h"
#include "pagoda/io/swap_space.h"
#include "pagoda/pager/home.h"
#include "pagoda/pager/host_memory.h"
#include "pagoda/pager/tier.h"

namespace pagoda::pager {

/// What bytes are for, as budgets and statistics name it.
namespace tag {
inline constexpr std::string_view kPages = "pages";            // resident pages, on the device
inline constexpr std::string_view kParameters = "parameters";  // homes of parameters
inline constexpr std::string_view kGradients = "gradients";    // homes of gradients
inline constexpr std::string_view kOptimizer = "optimizer";    // homes of optimizer state
inline constexpr std::string_view kEarly = "early updates";    // what they write until step()
inline constexpr std::string_view kStaging = "staging";        // buffers on the way
inline constexpr std::string_view kGradientStaging = "gradient staging";
inline constexpr std::string_view kChecksums = "checksums";
}  // namespace tag

/// The memory and disk of one rank: three budgets and what is taken from them.
///
/// Everything a rank keeps lies in a Home that this hands out, in the device arena, or in a buffer
/// reserved here, so the budgets hold for all of it. All members may be called from any thread.
class Tiers {
 public:
  struct Options {
    std::shared_ptr<device::Device> device;
    Bytes device_budget = 0;
    /// Part of device_budget that gradients on their way off the device may take, beside the one
    /// that somebody waits for.
    Bytes gradient_staging = 0;
    /// Where that is one part in so many of any budget; 0: it was set by itself.
    Bytes gradient_share = 0;
    Bytes host_budget = 0;
    /// Whether that is what the machine has left, and nobody has set it.
    bool host_budget_derived = false;
    /// Swap space; none without directories. Its capacity is the NVMe budget.
    io::SwapOptions swap;
  };

  /// NVMe budgets are multiples of this.
  static constexpr Bytes kNvmeBlock = io::ExtentAllocator::kAlignment;
  /// What so many bytes take there.
  static constexpr Bytes nvme_bytes(Bytes bytes) noexcept {
    return io::ExtentAllocator::rounded(bytes);
  }

  /// Blocks of device memory are multiples of this.
  static constexpr Bytes kDeviceBlock = 512;
  /// What so many bytes take of the part of device_budget that is for pages.
  static constexpr Bytes device_bytes(Bytes bytes) noexcept {
    return bytes == 0 ? kDeviceBlock : align_up(bytes, kDeviceBlock);
  }
  /// The smallest device_budget that has `pages` bytes for pages.
  static Bytes least_device_budget(const Options& options, Bytes pages) noexcept;

  explicit Tiers(Options options);
  Tiers(const Tiers&) = delete;
  Tiers& operator=(const Tiers&) = delete;
  ~Tiers();

  /// Bytes for `tag`, where `placement` says. BudgetExceeded when they fit nowhere it allows.
  Home allocate(Bytes bytes, Placement placement, std::string_view tag, std::string_view name);
  /// The same in host memory; nothing where that has no room.
  std::optional<Home> try_allocate_on_host(Bytes bytes, std::string_view tag,
                                           std::string_view name);

  /// A home made of a block of the arena.
  Home as_home(device::Block block);

  /// Moves bytes between a home and host memory; returns when they have arrived. Throws what the
  /// disk or the device did. On the device, a write waits for users that were marked.
  void read(const Home& home, Bytes offset, std::span<std::byte> to);
  void write(const Home& home, Bytes offset, std::span<const std::byte> from);
  /// Before the host writes to a home where it lies: on the device, streams may still use it.
  void wait_for_users(const Home& home) const {
    if (home.tier() == Tier::Device && in_place(home)) home.block().wait_for_users();
  }

  /// Whether the host may work on the home's bytes where they lie, at Home::data().
  bool in_place(const Home& home) const noexcept {
    return home.tier() == Tier::Host || (home.tier() == Tier::Device && device_is_host());
  }
  /// Whether that is so for every home there can be.
  bool all_in_place() const noexcept { return device_is_host() && swap_ == nullptr; }
  /// Whether the host may read and write device memory itself.
  bool device_is_host() const noexcept;
  const std::shared_ptr<device::Device>& device() const noexcept { return options_.device; }
  /// Resident pages.
  device::Arena& arena() noexcept { return *arena_; }
  const device::Arena& arena() const noexcept { return *arena_; }
  HostMemory& host() noexcept { return host_memory_; }
  /// Null without swap directories.
  io::SwapSpace* swap() noexcept { return swap_.get(); }
  bool swaps() const noexcept { return swap_ != nullptr; }
  /// Host memory of the checksums of so many bytes on NVMe.
  Bytes checksum_bytes(Bytes on_nvme) const noexcept {
    return swap_ == nullptr ? 0 : swap_->sum_bytes(on_nvme);
  }
  /// Host memory that is not given to homes, for the checksums of what goes to NVMe later.
  Bytes kept_for_checksums(Bytes nvme_available, Bytes host_limit) const noexcept {
    constexpr Bytes kMost = 16;  // one part in so many
    return std::min(checksum_bytes(nvme_available), host_limit / kMost);
  }
  Bytes gradient_staging() const noexcept { return options_.gradient_staging; }
  const Options& options() const noexcept { return options_; }

  Budget& budget(Tier tier) noexcept;
  const Budget& budget(Tier tier) const noexcept;

 private:
  Home on_device(Bytes bytes, std::string_view tag, std::string_view name);
  Home on_nvme(Bytes bytes, std::string_view tag);

  Options options_;
  Budget device_budget_;
  Budget host_budget_;
  Budget nvme_budget_;
  Budget swap_files_;  // what the files themselves claim; nvme_budget_ counts what is in them
  Reservation gradient_staging_;
  std::unique_ptr<device::Arena> arena_;
  std::shared_ptr<device::Stream> copies_;
  HostMemory host_memory_;
  std::unique_ptr<io::SwapSpace> swap_;
  Reservation bounce_;  // host bytes of the swap space's own buffers
};

}  // namespace pagoda::pager

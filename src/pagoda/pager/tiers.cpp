// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/tiers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/memory_limit.h"
#include "pagoda/base/out_of_memory.h"

namespace pagoda::pager {
namespace {

// Pinned host memory is taken in pieces of this size.
constexpr Bytes kSlab = 64_MiB;

/// Why the device has no room for device_budget. On a CPU it is addresses first, which a limit of
/// the process may refuse on a machine that has the memory.
std::string why_not_reserved(const Tiers::Options& options, const EngineError& error) {
  const auto limit = tightest_memory_limit();
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr && limit &&
      options.device_budget > limit->left()) {
    return fmt::format("device_budget = {} cannot be reserved: {}; raise the limit{}",
                       format_bytes(options.device_budget), limit->describe(),
                       limit->left() == 0
                           ? ""
                           : fmt::format(", or set device_budget to less than the {} that are left",
                                         format_bytes(limit->left())));
  }
  const device::MemoryInfo memory = options.device->memory_info();
  return fmt::format(
      "device_budget = {} cannot be had: {} has {} of {} free ({}); lower device_budget",
      format_bytes(options.device_budget), options.device->name(), format_bytes(memory.free),
      format_bytes(memory.total), error.message());
}

}  // namespace

Bytes Tiers::least_device_budget(const Options& options, Bytes pages) noexcept {
  const Bytes wanted = device_bytes(pages);
  const Bytes share = options.gradient_share;
  if (share <= 1) return wanted + options.gradient_staging;
  // Smallest b with b - b / share >= wanted.
  Bytes budget = wanted + wanted / (share - 1);
  while (budget - budget / share < wanted) ++budget;
  while (budget - 1 - (budget - 1) / share >= wanted) --budget;
  return budget;
}

Tiers::Tiers(Options options)
    : options_(std::move(options)),
      device_budget_("device_budget", options_.device_budget),
      host_budget_("host_budget", options_.host_budget),
      nvme_budget_("nvme_budget", options_.swap.directories.empty() ? 0 : options_.swap.capacity),
      swap_files_("swap files", options_.swap.directories.empty() ? 0 : options_.swap.capacity),
      gradient_staging_(device_budget_.reserve(options_.gradient_staging, tag::kGradientStaging)),
      copies_(options_.device->make_stream({.name = "homes"})),
      host_memory_(options_.device, host_budget_, kSlab) {
  try {
    arena_ = std::make_unique<device::Arena>(
        options_.device, device_budget_.reserve(device_budget_.available(), tag::kPages),
        device::ArenaOptions{.name = "pages", .alignment = kDeviceBlock});
  } catch (const EngineError& error) {
    throw UserError(why_not_reserved(options_, error));
  }
  if (!options_.swap.directories.empty()) {
    swap_ = std::make_unique<io::SwapSpace>(options_.swap, swap_files_);
    bounce_ = host_budget_.reserve(swap_->stats().bounce_bytes, tag::kStaging);
  }
}

Tiers::~Tiers() = default;

Home Tiers::allocate(Bytes bytes, Placement placement, std::string_view tag,
                     std::string_view name) {
  if (placement == Placement::Device) return on_device(bytes, tag, name);
  if (placement == Placement::Nvme) return on_nvme(bytes, tag);
  if (auto home = try_allocate_on_host(bytes, tag, name)) return std::move(*home);
  if (swap_ != nullptr) return on_nvme(bytes, tag);
  // Throws, with the holders.
  (void)host_budget_.reserve(bytes, tag);
  throw EngineError("host memory was refused, and fits");
}

Home Tiers::on_device(Bytes bytes, std::string_view tag, std::string_view name) {
  if (auto block = arena_->try_allocate(bytes, name)) return as_home(std::move(*block));
  const device::ArenaStats arena = arena_->stats();
  throw BudgetExceeded(
      fmt::format(
          "device_budget = {} has {} of {} for pages left, {} of it in one piece, and {} are "
          "needed for {}: raise device_budget to at least {}",
          format_bytes(options_.device_budget), format_bytes(arena.free),
          format_bytes(arena.capacity), format_bytes(arena.largest_free), format_bytes(bytes), tag,
          format_bytes_up(least_device_budget(options_, arena.capacity + bytes))),
      "device_budget", arena.capacity, bytes, arena.largest_free);
}

Home Tiers::as_home(device::Block block) {
  Home home;
  home.size_ = block.size();
  home.block_ = std::move(block);
  home.tier_ = Tier::Device;
  home.exists_ = true;
  return home;
}

std::optional<Home> Tiers::try_allocate_on_host(Bytes bytes, std::string_view tag,
                                                std::string_view name) {
  const Bytes sums = kept_for_checksums(nvme_budget_.available(), host_budget_.limit());
  if (!host_memory_.fits(bytes + sums, tag)) return std::nullopt;
  Home home;
  try {
    home.memory_ = host_memory_.allocate(bytes, tag, name);
  } catch (const BudgetExceeded&) {  // somebody was faster
    return std::nullopt;
  }
  home.tier_ = Tier::Host;
  home.size_ = bytes;
  home.exists_ = true;
  return home;
}

Home Tiers::on_nvme(Bytes bytes, std::string_view tag) {
  PAGODA_REQUIRE(swap_ != nullptr, "'nvme' needs a directory to swap in: set nvme (state {})", tag);
  Home home;
  home.space_ = nvme_budget_.reserve(nvme_bytes(bytes), tag);
  if (bytes > 0) {
    home.sums_ = host_budget_.reserve(swap_->sum_bytes(bytes), tag::kChecksums);
    home.extent_ = swap_->allocate(bytes);
  }
  home.tier_ = Tier::Nvme;
  home.size_ = bytes;
  home.exists_ = true;
  return home;
}

void Tiers::read(const Home& home, Bytes offset, std::span<std::byte> to) {
  PAGODA_CHECK_LE(offset + to.size(), home.size());
  if (to.empty()) return;
  switch (home.tier()) {
    case Tier::Host:
      std::memcpy(to.data(), home.data() + offset, to.size());
      return;
    case Tier::Nvme:
      swap_->read(home.extent(), offset, to).wait();
      return;
    case Tier::Device:
      copies_->copy_async(to.data(), home.block().on(*copies_) + offset, to.size(),
                          device::Direction::DeviceToHost, "home");
      copies_->synchronize();
      return;
  }
}

void Tiers::write(const Home& home, Bytes offset, std::span<const std::byte> from) {
  PAGODA_CHECK_LE(offset + from.size(), home.size());
  if (from.empty()) return;
  switch (home.tier()) {
    case Tier::Host:
      std::memcpy(const_cast<std::byte*>(home.data()) + offset, from.data(), from.size());
      return;
    case Tier::Nvme:
      swap_->write(home.extent(), offset, from).wait();
      return;
    case Tier::Device:
      home.block().wait_for_users(*copies_);
      copies_->copy_async(home.block().on(*copies_) + offset, from.data(), from.size(),
                          device::Direction::HostToDevice, "home");
      copies_->synchronize();
      return;
  }
}

bool Tiers::device_is_host() const noexcept {
  return options_.device->kind() != device::DeviceKind::Cuda;
}

Budget& Tiers::budget(Tier tier) noexcept {
  return tier == Tier::Device ? device_budget_ : tier == Tier::Host ? host_budget_ : nvme_budget_;
}

const Budget& Tiers::budget(Tier tier) const noexcept {
  return tier == Tier::Device ? device_budget_ : tier == Tier::Host ? host_budget_ : nvme_budget_;
}

}  // namespace pagoda::pager

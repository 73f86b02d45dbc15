// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/pager/pager.h"
#include "unit/io/scratch_directory.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::pager {

/// A pager with a small arena on some device, homes on some tier.
class PagerOn : public testing::TestWithParam<std::tuple<bool, Placement>> {
 protected:
  static constexpr Bytes kArena = 32_KiB;

  PagerOn() {
    Tiers::Options options;
    options.device =
        std::get<0>(GetParam()) ? device::emulated::make_device() : device::host::make_device({});
    options.device_budget = kArena;
    options.host_budget = 64_MiB;
    options.swap.directories = {directory_.path()};
    options.swap.capacity = 16_MiB;
    tiers_ = std::make_unique<Tiers>(options);
    Pager::Options pages;
    pages.fetch_threads = 3;
    pages.staging = 4_KiB;
    pages.least_lookup = 2000;
    pager_ = std::make_unique<Pager>(*tiers_, pages);
  }
  ~PagerOn() override { pager_.reset(); }

  /// A page of `bytes` bytes that are all `value`.
  Page& page(Bytes bytes, unsigned char value) {
    const std::vector<std::byte> contents(bytes, std::byte{value});
    Page& out = pager_->adopt(fmt::format("page {}", value), bytes / 2, 2, std::get<1>(GetParam()),
                              contents.data(), device::Direction::HostToHost);
    bindings_.push_back(std::make_unique<PlainBinding>());
    pager_->set_binding(out, bindings_.back().get());
    return out;
  }
  PlainBinding& binding(const Page& page) { return *bindings_[page.id]; }

  /// What an operator sees of the page.
  std::vector<std::byte> seen(Page& page) {
    const Access access{&page, false};
    Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    const std::vector<std::byte> out(binding(page).data(), binding(page).data() + page.bytes());
    pin.release();
    return out;
  }
  void write(Page& page, std::size_t at, unsigned char value) {
    const Access access{&page, true};
    Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    binding(page).data()[at] = std::byte{value};
    pin.release();
  }

  const io::ScratchDirectory directory_;
  std::unique_ptr<Tiers> tiers_;
  std::vector<std::unique_ptr<PlainBinding>> bindings_;
  std::unique_ptr<Pager> pager_;
};

/// Every device with every tier that homes may be on, for INSTANTIATE_TEST_SUITE_P; and their
/// names.
inline const auto kDevicesAndHomes =
    testing::Combine(testing::Bool(), testing::Values(Placement::Host, Placement::Nvme));
inline constexpr auto kDeviceAndHome = [](const auto& info) {
  return fmt::format("{}{}", std::get<0>(info.param) ? "Emulated" : "Plain",
                     std::get<1>(info.param) == Placement::Host ? "Host" : "Nvme");
};

}  // namespace pagoda::pager

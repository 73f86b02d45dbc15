// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace pagoda::pager {

/// Where bytes lie, from the fastest memory to the largest.
enum class Tier : std::uint8_t { Device, Host, Nvme };

/// Where a state is asked to lie.
enum class Placement : std::uint8_t {
  Device,  ///< there, or an error
  Host,    ///< there, and page by page on NVMe once the host budget is full
  Nvme,    ///< there, or an error
  Auto,    ///< from the top: what fits stays as near as it fits
};

/// "device", "host" or "nvme".
std::string_view name(Tier tier) noexcept;
/// "device", "host", "nvme" or "auto".
std::string_view name(Placement placement) noexcept;

}  // namespace pagoda::pager

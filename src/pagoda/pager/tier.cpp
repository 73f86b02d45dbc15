// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/tier.h"

#include "pagoda/base/error.h"

namespace pagoda::pager {

std::string_view name(Tier tier) noexcept {
  switch (tier) {
    case Tier::Device:
      return "device";
    case Tier::Host:
      return "host";
    case Tier::Nvme:
      return "nvme";
  }
  return "?";
}

std::string_view name(Placement placement) noexcept {
  switch (placement) {
    case Placement::Device:
      return "device";
    case Placement::Host:
      return "host";
    case Placement::Nvme:
      return "nvme";
    case Placement::Auto:
      return "auto";
  }
  return "?";
}

Placement parse_placement(std::string_view word) {
  for (const Placement placement :
       {Placement::Device, Placement::Host, Placement::Nvme, Placement::Auto}) {
    if (word == name(placement)) return placement;
  }
  throw UserError(
      fmt::format("'{}' is not a placement: expected device, host, nvme or auto", word));
}

}  // namespace pagoda::pager

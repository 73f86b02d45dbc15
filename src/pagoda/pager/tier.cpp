// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/tier.h"

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

}  // namespace pagoda::pager

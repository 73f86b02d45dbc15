// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/device/device.h"
#include "pagoda/engine/config.h"

namespace pagoda::engine {

/// Host memory that an engine takes for one purpose before it has a model.
struct HostNeed {
  std::string purpose;  ///< with the keys that decide it
  Bytes bytes = 0;
};

/// All of it: buffers are taken once, when the engine is made, so that nothing fails for want of
/// one later. What they come to is the smallest host_budget.
std::vector<HostNeed> host_needs(const Config& config, device::DeviceKind kind, int ranks);

/// Update buffers that are taken: update_buffers, or fewer where those were much of host_budget.
unsigned update_buffers(const Config& config, device::DeviceKind kind, int ranks);

/// UserError with all of them, largest first, where host_budget has no room for their sum.
void check_host_budget(const Config& config, device::DeviceKind kind, int ranks);

}  // namespace pagoda::engine

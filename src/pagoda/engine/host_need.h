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

/// The update buffers of an engine, which are the only ones that depend on host_budget: as many as
/// update_buffers says, or fewer where those were much of it. A plain value.
class UpdateBuffers {
 public:
  UpdateBuffers(const Config& config, device::DeviceKind kind, int ranks);

  /// How many are taken at a host_budget that has room for all that host_needs() lists.
  unsigned count(Bytes host_budget) const noexcept;
  /// The host memory that they take.
  Bytes bytes(Bytes host_budget) const noexcept;
  /// The smallest host_budget that leaves `more` bytes beside them than `host_budget` does.
  Bytes least_budget(Bytes host_budget, Bytes more) const noexcept;

 private:
  Bytes each_;
  bool take_memory_;  // otherwise updates work where states lie
  unsigned least_;
  unsigned most_;
  Bytes needs_ = 0;  // of the engine, with `least_` of them
};

/// UserError with all of them, largest first, where host_budget has no room for their sum.
void check_host_budget(const Config& config, device::DeviceKind kind, int ranks);

}  // namespace pagoda::engine

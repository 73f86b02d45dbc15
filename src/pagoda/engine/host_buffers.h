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

/// The buffers that an engine takes from host_budget once, when it is made, so that nothing fails
/// for want of one later. Of sizes that the configuration leaves open each kind takes a share of
/// the budget (plan/buffer_size.h); of update buffers there are as many as update_buffers says, or
/// fewer where those were much of it. A plain value, for any host_budget: to see what another one
/// would leave.
class HostBuffers {
 public:
  HostBuffers(const Config& config, device::DeviceKind kind, int ranks);

  /// Bytes of each staging buffer.
  Bytes staging(Bytes host_budget) const noexcept;
  /// Elements of the state that an update buffer has room for.
  std::uint64_t update_elements(Bytes host_budget) const noexcept;
  unsigned update_buffers(Bytes host_budget) const noexcept;

  /// Everything, with as few update buffers as can be.
  std::vector<HostNeed> needs(Bytes host_budget) const;
  /// What is taken.
  Bytes bytes(Bytes host_budget) const noexcept;
  /// The smallest host_budget that has room for the buffers alone, as messages print it.
  Bytes least() const noexcept;
  /// A host_budget that leaves `more` bytes beside them than `host_budget` does.
  Bytes least_budget(Bytes host_budget, Bytes more) const noexcept;

 private:
  Bytes update_chunk(Bytes host_budget) const noexcept;
  Bytes update_buffer_bytes(Bytes host_budget) const noexcept;
  Bytes needed(Bytes host_budget) const noexcept;

  Bytes staging_;       // as it is given; 0: derived
  Bytes update_chunk_;  // the same
  Bytes activation_reserve_;
  Bytes parking_;          // of gradients that wait on disk
  Bytes swap_ = 0;         // buffers of the swap files
  Bytes staging_buffers_;  // how many
  unsigned least_updates_;
  unsigned most_updates_;
  bool updates_in_place_;  // no buffers: every state lies where the host may update it
};

/// UserError with all of them, largest first, where host_budget has no room for their sum.
void check_host_budget(const Config& config, device::DeviceKind kind, int ranks);

}  // namespace pagoda::engine

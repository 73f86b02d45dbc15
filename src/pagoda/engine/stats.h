// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/budget.h"
#include "pagoda/comm/group.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager_stats.h"
#include "pagoda/pager/tier.h"

namespace pagoda::engine {

/// What one tier holds.
struct TierStats {
  Bytes limit = 0;
  Bytes used = 0;
  Bytes peak = 0;
  std::vector<BudgetHolder> holders;  // by tag, with peaks
};

/// Memory that no budget counts: see "What counts" in docs/config.md.
struct UnbudgetedStats {
  Bytes group_buffers = 0;  // on the device, of the process group that gradients go over
  Bytes free_blocks = 0;    // mappings of large tensors that have gone, kept for the next ones
  Bytes free_heap = 0;      // freed, and still with the C library
};

/// What an engine has done since it was made, and what it holds now. Cheap enough for every step.
struct Stats {
  std::uint64_t steps = 0;
  std::uint64_t skipped_steps = 0;
  pager::PagerStats pager;
  optim::UpdaterStats updates;
  ReducerStats gradients;
  std::uint64_t pulled = 0;  // bytes read from other ranks
  std::uint64_t served = 0;  // bytes read by other ranks
  Bytes device_pages = 0;    // resident now, of the device budget's pages
  Bytes device_pages_peak = 0;
  std::array<TierStats, 3> tiers;  // by Tier
  UnbudgetedStats unbudgeted;

  /// What a holder has of a tier now.
  Bytes held(pager::Tier tier, std::string_view tag) const noexcept;
  /// Updates that operators did not wait for, as a share of all; 1 when there were none.
  double hidden_updates() const noexcept;
  /// As people read it.
  std::string table() const;
};

}  // namespace pagoda::engine

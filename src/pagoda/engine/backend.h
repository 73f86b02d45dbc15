// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <memory>

#include "pagoda/device/device.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::engine {

/// The host's budget where none is set.
inline constexpr Bytes kNoLimit = std::numeric_limits<Bytes>::max() / 2;

/// The device that the configuration names; "auto" is a GPU where there is one.
std::shared_ptr<device::Device> make_device(const Config& config);

/// The configuration's word for a place, as the pager says it.
pager::Placement pager_placement(Placement placement);

/// Whether, and how, updates begin early under this configuration.
EarlyUpdates::Mode early_mode(const Config& config) noexcept;

/// How many of the ranks are on this machine, as torchrun says; all, where nobody says it.
int ranks_here(int ranks);

/// Budgets and swap space of one rank, with what the configuration leaves open filled in.
pager::Tiers::Options tiers_options(const Config& config,
                                    const std::shared_ptr<device::Device>& device, int ranks);

/// The tiers themselves. A UserError says which key has how much, and how much it needs.
std::unique_ptr<pager::Tiers> make_tiers(const Config& config,
                                         const std::shared_ptr<device::Device>& device, int ranks);

}  // namespace pagoda::engine

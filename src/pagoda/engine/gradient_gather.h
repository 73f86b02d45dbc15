// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "pagoda/base/bytes.h"
#include "pagoda/comm/group.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/sharding.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::engine {

/// The norm of all gradients, from the sums of squares that every rank keeps of its parts. The bits
/// do not depend on how many ranks there are. A collective; `group` null: one rank.
double gradient_norm(std::span<const std::unique_ptr<optim::TrainedPage>> pages,
                     const pager::Sharding& sharding, comm::Group* group);

/// Host memory that the norm takes: the sums that this rank keeps, and all ranks' for a moment.
Bytes gradient_norm_bytes(std::span<const std::unique_ptr<optim::TrainedPage>> pages, int ranks);

/// Every rank gets the whole reduced gradient of these pages, of which it has its own part. A
/// collective, of no more than `bucket` bytes at a time; what is not in memory passes through
/// `buffer`. Both are of one size on all ranks.
void gather_gradients(std::span<optim::TrainedPage* const> pages, pager::Tiers& tiers,
                      const pager::Sharding& sharding, Bytes bucket, std::span<std::byte> buffer,
                      comm::Group& group);

}  // namespace pagoda::engine

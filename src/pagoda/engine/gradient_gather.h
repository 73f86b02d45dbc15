// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "pagoda/base/bytes.h"
#include "pagoda/comm/group.h"
#include "pagoda/optim/gradients.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/sharding.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::engine {

/// The norm of all gradients, from the sums of squares that every rank keeps of its parts. The bits
/// do not depend on how many ranks there are. A collective; `group` null: one rank.
double gradient_norm(std::span<const std::unique_ptr<optim::TrainedPage>> pages,
                     const pager::Sharding& sharding, comm::Group* group);

/// Every rank gets the whole reduced gradient of these pages, of which it has its own part. A
/// collective, of buffer.size() bytes at a time, the same on all ranks; what is not in memory
/// passes through the buffer.
void gather_gradients(std::span<optim::TrainedPage* const> pages, pager::Tiers& tiers,
                      const pager::Sharding& sharding, std::span<std::byte> buffer,
                      comm::Group& group);

/// The same for one page, as fp32 to where the caller wants it, and without keeping it. `to` is
/// empty where nobody looks. `piece` bytes at a time, the same on all ranks.
void gather_values(const optim::TrainedPage& page, optim::Gradients& gradients,
                   const pager::Sharding& sharding, Bytes piece, std::span<float> to,
                   comm::Group& group);

}  // namespace pagoda::engine

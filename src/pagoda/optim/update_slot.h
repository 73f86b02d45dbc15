// SPDX-License-Identifier: Apache-2.0
// Included by the updater's own files alone.
#pragma once

#include <utility>

#include "pagoda/optim/update_chunk.h"
#include "pagoda/optim/update_record.h"

namespace pagoda::optim {

/// A chunk in flight. One is used again when its last chunk has been written. The updater's thread.
struct UpdateSlot {
  UpdateSlot(pager::Tiers& tiers, pager::HostBlock buffer) : chunk(tiers, std::move(buffer)) {}

  UpdateChunk chunk;
  UpdateRecord* record = nullptr;
};

}  // namespace pagoda::optim

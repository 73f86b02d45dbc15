// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pagoda/base/bytes.h"
#include "pagoda/base/clock.h"

namespace pagoda::pager {

/// What a pager has done since it was made. Differences between two are what a step did.
struct PagerStats {
  std::uint64_t touches = 0;            // pages that operators asked for
  std::uint64_t faults = 0;             // …that were absent and on no one's way
  std::uint64_t late_prefetches = 0;    // …that were on their way: the operator waited
  std::uint64_t prefetch_hits = 0;      // …that a prefetch had brought in time
  std::uint64_t prefetches = 0;         // fetches begun ahead of their touch
  std::uint64_t wasted_prefetches = 0;  // …and evicted unused
  std::uint64_t lookups = 0;            // operators that read rows where they lie
  std::uint64_t evictions = 0;
  std::uint64_t writebacks = 0;
  Nanos fetch_busy = 0;      // fetches took so long, one after the other
  Nanos fault_stall = 0;     // operators stalled on faults
  Nanos late_stall = 0;      // …on late prefetches
  Nanos update_stall = 0;    // …on pending updates
  Bytes nvme_to_host = 0;    // nc
  Bytes host_to_device = 0;  // cg
  Bytes gathered = 0;        // gg: other ranks' shards
  Bytes device_to_host = 0;  // write-backs of pages
  Bytes host_to_nvme = 0;    // …

  /// Of the touches that needed bytes moved, how many found them there in time.
  double hit_rate() const noexcept {
    const std::uint64_t moved = faults + late_prefetches + prefetch_hits;
    return moved == 0
               ? 1
               : static_cast<double>(prefetch_hits + late_prefetches) / static_cast<double>(moved);
  }
};

}  // namespace pagoda::pager

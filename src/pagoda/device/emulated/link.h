// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/bytes.h"
#include "pagoda/base/clock.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::device::emulated {

/// How fast bytes go in one direction.
struct LinkOptions {
  /// 0: as fast as this machine copies.
  double bytes_per_second = 0;
  /// From the last byte sent to the copy being done.
  Nanos latency = 0;
};

/// One direction of the bus, with one copy engine: copies of all streams take turns in the order
/// in which their streams reach them, each at the full bandwidth. The latency of one overlaps the
/// next. All members may be called from any thread.
class Link {
 public:
  /// When a copy's bytes start to move and when it is done.
  struct Slot {
    Nanos begin = 0;
    Nanos end = 0;
  };

  explicit Link(const LinkOptions& options) : options_(options) {}

  /// Takes the link's next free time for a copy that could start at `now`.
  Slot take(Bytes bytes, Nanos now);

 private:
  const LinkOptions options_;
  RankedMutex<LockRank::Link> mutex_;
  Nanos free_at_ = 0;  // guarded by mutex_
};

}  // namespace pagoda::device::emulated

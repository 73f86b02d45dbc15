// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "pagoda/device/arena.h"

namespace pagoda::device {

/// An Arena of page-locked host memory: huge pages, touched in parallel and then registered with
/// the device, which sets up several times faster than the runtime's own pinned allocator. Absent
/// in forked children. As thread-safe as Arena.
class PinnedArena : public Arena {
 public:
  /// For file I/O into it, give an alignment of 4096.
  PinnedArena(std::shared_ptr<Device> device, Reservation reservation, ArenaOptions options = {})
      : Arena(std::move(device), MemoryKind::Pinned, std::move(reservation), std::move(options)) {}
};

}  // namespace pagoda::device

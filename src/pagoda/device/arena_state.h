// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/budget.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/block.h"
#include "pagoda/device/free_ranges.h"
#include "pagoda/device/memory.h"
#include "pagoda/device/vector_clock.h"

namespace pagoda::device {

/// What an Arena and its blocks share: the memory, and who has which part of it. Lives until the
/// last of them goes. All members may be called from any thread.
class ArenaState {
 public:
  ArenaState(std::shared_ptr<Device> device, MemoryKind kind, Reservation reservation,
             ArenaOptions options);
  ArenaState(const ArenaState&) = delete;
  ArenaState& operator=(const ArenaState&) = delete;
  ~ArenaState();

  /// Null when it does not fit. `stream` null: for the host, which waits here.
  LiveBlock* take(Bytes bytes, Stream* stream, std::string_view name);
  /// Tells the checker, after the caller has made a handle that gives the block back.
  void announce(const LiveBlock& live, const Stream* stream);
  /// The block that starts at `data`, or an EngineError that says what is there instead.
  void touch(const std::byte* data, Stream& stream);
  void free(const std::byte* data);
  /// Block's functions of the same names; `stream` null: the host waits.
  void mark_users(const std::byte* data, std::vector<Mark>& taken);
  void wait_for_users(const std::byte* data, Stream* stream);

  ArenaStats stats() const;
  std::vector<LeakedBlock> live() const;
  std::byte* data() const noexcept { return base_; }
  Bytes capacity() const noexcept { return capacity_; }
  MemoryKind kind() const noexcept { return memory_->kind(); }
  const ArenaOptions& options() const noexcept { return options_; }

 private:
  /// Holds mutex_, and passes on what the last holder knew to be over (the checker cannot see the
  /// mutex itself).
  class Lock;

  LiveBlock* take_range(Bytes taken, Fences& fences, const Lock&);
  LiveBlock& find(const std::byte* data, const Lock&);
  ArenaStats stats(const Lock&) const;

  const std::shared_ptr<Device> device_;
  Reservation reservation_;
  const ArenaOptions options_;
  std::unique_ptr<Memory> memory_;
  std::byte* base_ = nullptr;
  Bytes capacity_ = 0;
  mutable RankedMutex<LockRank::Arena> mutex_;
  mutable VectorClock known_;        // guarded by mutex_; used with a checker only
  FreeRanges free_;                  // guarded by mutex_
  std::map<Bytes, LiveBlock> live_;  // guarded by mutex_, by offset; nodes stay where they are
  ArenaStats counters_;              // guarded by mutex_: peak, quarantined and the counts
};

}  // namespace pagoda::device

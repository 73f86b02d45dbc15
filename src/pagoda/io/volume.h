// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/io/block_locks.h"
#include "pagoda/io/bounce_pool.h"
#include "pagoda/io/cut.h"
#include "pagoda/io/engine.h"
#include "pagoda/io/stripe_map.h"
#include "pagoda/io/swap_file.h"
#include "pagoda/io/swap_options.h"

namespace pagoda::io {

/// What pieces count as they go. Relaxed: each is a sum of its own.
struct VolumeCounters {
  std::atomic<std::uint64_t> bytes_read{0};
  std::atomic<std::uint64_t> bytes_written{0};
  std::atomic<std::uint64_t> device_bytes_read{0};
  std::atomic<std::uint64_t> device_bytes_written{0};
  std::atomic<std::uint64_t> requests{0};
  std::atomic<std::uint64_t> short_transfers{0};
  std::atomic<std::uint64_t> bounced_bytes{0};
  std::atomic<std::uint64_t> modified_blocks{0};
  std::atomic<std::uint64_t> checksum_errors{0};
  std::atomic<std::uint64_t> errors{0};
};

/// What a piece runs on: the files of a space with their engines, block locks and bounce buffers.
///
/// Fixed after construction; all members may be called from any thread.
class Volume {
 public:
  /// `capacity` is a multiple of the page.
  Volume(const SwapOptions& options, Bytes capacity);
  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;
  /// Waits for every transfer.
  ~Volume();

  const Grid& grid() const noexcept { return grid_; }
  bool checksums() const noexcept { return checksums_; }
  bool direct() const noexcept { return direct_; }
  const StripeMap& map() const noexcept { return map_; }
  const std::vector<SwapFile>& files() const noexcept { return files_; }
  BlockLocks& locks() noexcept { return locks_; }
  BouncePool& bounce() noexcept { return bounce_; }
  VolumeCounters& counters() noexcept { return counters_; }

  /// Whether the disk can reach `data` itself.
  bool reachable(const std::byte* data) const noexcept {
    return reinterpret_cast<std::uintptr_t>(data) % memory_alignment_ == 0;
  }
  /// Which engine serves the byte at `position`: one of its file's, a cell each in turn.
  unsigned engine_index(Bytes position) const noexcept;
  Engine& engine(unsigned index) noexcept { return *engines_[index]; }
  unsigned engine_count() const noexcept { return static_cast<unsigned>(engines_.size()); }

  /// Brackets a transfer's life.
  void transfer_began() noexcept;
  void transfer_ended() noexcept;

 private:
  std::vector<SwapFile> files_;
  const StripeMap map_;
  const bool checksums_;
  bool direct_ = false;
  Grid grid_{};
  Bytes memory_alignment_ = 1;
  const unsigned rings_;
  BlockLocks locks_;
  BouncePool bounce_;
  VolumeCounters counters_;
  RankedMutex<LockRank::Volume> mutex_;
  Condition idle_;
  std::size_t transfers_ = 0;                     // guarded by mutex_
  std::vector<std::unique_ptr<Engine>> engines_;  // last: its threads use all of the above
};

}  // namespace pagoda::io

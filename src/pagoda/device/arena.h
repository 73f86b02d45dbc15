// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/budget.h"
#include "pagoda/base/bytes.h"
#include "pagoda/base/error.h"
#include "pagoda/device/block.h"
#include "pagoda/device/memory.h"

namespace pagoda::device {

class Device;

/// A block that was still in use when its arena went.
struct LeakedBlock {
  std::string name;
  Bytes offset = 0;
  Bytes size = 0;
};

struct ArenaOptions {
  /// Shown in errors and traces.
  std::string name = "arena";
  /// Every block starts at a multiple of it, and takes a multiple of it. A power of two.
  Bytes alignment = 512;
  /// Told of blocks in use when the arena goes; empty: they are logged as an error.
  std::function<void(const std::vector<LeakedBlock>&)> on_leak = {};
  /// Touches pinned pages in parallel; null: threads of its own.
  ThreadPool* touchers = nullptr;
};

struct ArenaStats {
  Bytes capacity = 0;
  Bytes used = 0;  // rounded up to the alignment
  Bytes free = 0;
  Bytes largest_free = 0;
  Bytes peak = 0;         // the most that was used at once
  Bytes quarantined = 0;  // freed, but its streams could not be marked: never handed out again
  std::size_t blocks = 0;
  std::size_t free_ranges = 0;
  std::uint64_t allocations = 0;
  std::uint64_t failures = 0;  // allocations that did not fit
  std::uint64_t reuse_waits =
      0;  // events that an allocation made its stream (or the host) wait for

  /// 0: all free bytes are in one piece. Towards 1: only crumbs are left.
  double fragmentation() const noexcept {
    if (free == 0) return 0;
    return 1 - static_cast<double>(largest_free) / static_cast<double>(free);
  }
};

/// Thrown when no free range is large enough. The pager evicts and tries again.
class ArenaFull : public EngineError {
 public:
  ArenaFull(std::string message, Bytes requested, const ArenaStats& stats)
      : EngineError(std::move(message)), requested_(requested), stats_(stats) {}
  Bytes requested() const noexcept { return requested_; }
  const ArenaStats& stats() const noexcept { return stats_; }

 private:
  Bytes requested_;
  ArenaStats stats_;
};

/// Device memory, reserved once and cut into blocks by best fit.
///
/// Reuse is stream-ordered (docs/notes/ordering.md): freed bytes are free at once, and the stream
/// they are next allocated for waits for those that used them. All members may be called from any
/// thread.
class Arena {
 public:
  /// Takes `reservation.bytes()` of device memory and keeps the reservation as long as the memory.
  Arena(std::shared_ptr<Device> device, Reservation reservation, ArenaOptions options = {});
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  /// Waits for work that still uses freed blocks; blocks in use are reported, and keep the memory.
  ~Arena();

  /// A block that `stream` may use at once. Throws ArenaFull. Zero bytes are a block, too.
  Block allocate(Bytes bytes, Stream& stream, std::string_view name = {});
  /// The same, or nothing when it does not fit.
  std::optional<Block> try_allocate(Bytes bytes, Stream& stream, std::string_view name = {});
  /// A block that the host may use at once: waits for the streams that used its bytes before.
  Block allocate(Bytes bytes, std::string_view name = {});
  std::optional<Block> try_allocate(Bytes bytes, std::string_view name = {});

  /// Frees a block of this arena; EngineError for an empty handle or another arena's block, which
  /// is left as it is.
  void free(Block&& block);
  /// Frees a detached block. EngineError if no block starts there: freed twice, or not ours.
  void free(const std::byte* data);
  /// Touches a detached block, as Block::touch().
  void touch(const std::byte* data, Stream& stream);

  ArenaStats stats() const;
  const std::string& name() const noexcept;
  MemoryKind kind() const noexcept;
  /// The first byte; blocks lie at data() + offset().
  std::byte* data() const noexcept;
  bool contains(const void* data) const noexcept;
  /// Blocks in use now.
  std::vector<LeakedBlock> live() const;

 protected:
  Arena(std::shared_ptr<Device> device, MemoryKind kind, Reservation reservation,
        ArenaOptions options);

 private:
  std::optional<Block> take(Bytes bytes, Stream* stream, std::string_view name);

  std::shared_ptr<ArenaState> state_;
};

}  // namespace pagoda::device

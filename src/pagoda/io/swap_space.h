// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagoda/base/budget.h"
#include "pagoda/io/extent.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/io/swap_options.h"
#include "pagoda/io/transfer.h"

namespace pagoda::io {

/// One movement between memory and an extent, as part of a batch.
struct Move {
  Op op;
  const Extent* extent;
  Bytes offset;  ///< in the extent
  std::byte* memory;
  Bytes length;
  Priority priority = Priority::Normal;
};

/// Memory that transfers reach without the kernel looking it up each time. Unregisters when it
/// goes, which must be before the memory does and before its space does, and not in a callback.
class RegisteredBuffer {
 public:
  RegisteredBuffer() = default;
  RegisteredBuffer(RegisteredBuffer&& other) noexcept;
  RegisteredBuffer& operator=(RegisteredBuffer&& other) noexcept;
  ~RegisteredBuffer();

  /// False: the engine or the kernel refused (logged); transfers work all the same.
  bool registered() const noexcept { return registered_; }

 private:
  friend class SwapSpace;
  class SwapSpace* space_ = nullptr;
  std::span<std::byte> memory_;
  bool registered_ = false;
};

/// Private space on one or more disks, handed out as extents and moved asynchronously.
///
/// All members may be called from any thread. docs/notes/swap.md says what is promised: transfers
/// that share a block happen in the order they were submitted, others in any; every completion is
/// checked; an error is thrown by the transfer's wait(), or, if nobody waited, by the next call
/// here. Extents and transfers may outlive the space; registered buffers may not.
class SwapSpace {
 public:
  using Options = SwapOptions;

  struct Stats {
    ExtentAllocator::Stats space;
    std::uint64_t bytes_read = 0;            ///< as callers asked
    std::uint64_t bytes_written = 0;         ///< …
    std::uint64_t device_bytes_read = 0;     ///< as the disks did: whole blocks, reads to modify
    std::uint64_t device_bytes_written = 0;  ///< …
    std::uint64_t requests = 0;
    std::uint64_t short_transfers = 0;  ///< continued
    std::uint64_t bounced_bytes = 0;    ///< copied through a bounce buffer
    std::uint64_t modified_blocks = 0;  ///< written in part
    std::uint64_t checksum_errors = 0;
    std::uint64_t errors = 0;
    Bytes bounce_bytes = 0;  ///< host memory held by the bounce buffers
    Bytes sum_bytes = 0;     ///< host memory held by the checksums of all extents
  };

  /// Claims `options.capacity` from `budget` and from the disks. UserError when a directory is not
  /// usable or too full, BudgetExceeded when the budget is.
  SwapSpace(const Options& options, Budget& budget);
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;
  /// Waits for every transfer. In a forked child it only forgets.
  ~SwapSpace();

  /// Space for `length` bytes; BudgetExceeded when there is no such room.
  [[nodiscard]] Extent allocate(Bytes length);
  /// Host memory that an extent of `length` bytes takes at most for its checksums.
  Bytes sum_bytes(Bytes length) const noexcept;

  /// Moves bytes [offset, offset + memory.size()) of `extent`. The memory is the transfer's until
  /// it has ended. Under checksums, a block that was never written cannot be read (ENODATA);
  /// without, what it holds is unspecified.
  Transfer read(const Extent& extent, Bytes offset, std::span<std::byte> memory,
                TransferCallback callback = {});
  Transfer write(const Extent& extent, Bytes offset, std::span<const std::byte> memory,
                 TransferCallback callback = {});
  /// All of `moves` as one transfer, given to the engines as one batch.
  Transfer submit(std::span<const Move> moves, TransferCallback callback = {});

  /// Registers `memory` with every engine.
  [[nodiscard]] RegisteredBuffer register_buffer(std::span<std::byte> memory);

  /// Throws an error that no wait() has thrown, if there is one.
  void check();

  Bytes capacity() const noexcept;
  /// "uring" or "posix".
  std::string_view engine_name() const noexcept;
  bool direct() const noexcept;
  /// The files, for messages.
  std::vector<std::string> paths() const;
  Stats stats() const;

 private:
  friend class RegisteredBuffer;
  struct State;
  void unregister(std::span<std::byte> memory) noexcept;

  OwnerProcess owner_;
  std::unique_ptr<State> state_;
};

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

#include "pagoda/io/block_locks.h"
#include "pagoda/io/bounce_pool.h"
#include "pagoda/io/cut.h"
#include "pagoda/io/extent.h"
#include "pagoda/io/outbox.h"
#include "pagoda/io/request.h"
#include "pagoda/io/transfer.h"
#include "pagoda/io/volume.h"

namespace pagoda::io {

/// Where a piece is. Only states with a bounce buffer cost memory beside the piece itself.
enum class PieceState : std::uint8_t {
  Queued,   ///< waits for its blocks; holds nothing
  Locked,   ///< has its blocks; may wait in line for a bounce buffer
  Reading,  ///< the disk fills the caller's memory or the bounce buffer
  Writing,  ///< the disk takes from the caller's memory or the bounce buffer
  Failing,  ///< comes back by way of its engine with the error it has
};

/// One cut of a transfer, from its blocks' claim to its checked end (docs/notes/swap.md).
///
/// One thread at a time works on it: the submitting one until it is with an engine, then the one
/// that completes it or makes room for it. Hand-overs go through the mutexes of the engine, the
/// block locks and the bounce pool.
class Piece final : public Request, private BlockLocks::Claim, private BouncePool::Waiter {
 public:
  /// `memory` is where the cut's bytes lie. `sums`: for a write of whole blocks under checksums,
  /// room for one each; filled by hash().
  Piece(Volume& volume, TransferState& transfer, ExtentState& extent, Op kind, const Cut& cut,
        std::byte* memory, std::uint64_t* sums, Priority priority);

  /// Computes the checksums of a write of whole blocks, on the caller's thread.
  void hash() noexcept;
  /// Claims the blocks; goes on at once if they are free.
  void start(Outbox& outbox) noexcept;
  /// The next step of a piece that has what it waited for. Called by Outbox.
  void go_on(Outbox& outbox) noexcept;
  void complete(std::int64_t result) noexcept override;

  unsigned engine() const noexcept { return engine_; }

  /// Checksums a write of `cut` needs room for.
  static std::size_t sum_count(const Volume& volume, Op kind, const Cut& cut) noexcept;

 private:
  /// Blocks whose contents are not there to be read: null when all are.
  std::exception_ptr unreadable() const;
  void take_bounce(Outbox& outbox) noexcept;
  void issue(Op how, std::byte* memory, Outbox& outbox) noexcept;
  /// Judges the engine's answer. True: all bytes have moved. False: resubmitted or failed.
  bool arrived(std::int64_t result, Outbox& outbox) noexcept;
  void finish_read(Outbox& outbox) noexcept;
  void modify(Outbox& outbox) noexcept;
  void finish_write(Outbox& outbox) noexcept;
  /// Null when the covered blocks, now at `data`, have the checksums they were written with.
  std::exception_ptr verify(const std::byte* data) noexcept;
  void fail(std::exception_ptr error, Outbox& outbox) noexcept;
  void end(std::exception_ptr error, Outbox& outbox) noexcept;

  bool checked() const noexcept { return extent_.sums.enabled(); }
  Bytes request_length() const noexcept;
  /// Calls fn(block index, begin, end) for each covered block, in bytes of the space.
  template <class Fn>
  void for_each_block(Fn&& fn) const;
  std::exception_ptr error_at(const char* what, Bytes begin, Bytes end, int error_number) const;

  Volume& volume_;
  TransferState& transfer_;
  ExtentState& extent_;
  const Cut cut_;
  std::byte* const memory_;
  std::uint64_t* const sums_;
  const Op kind_;  // what the caller asked for; Request::op is what is with the engine
  PieceState state_ = PieceState::Queued;
  bool needs_bounce_;
  std::uint8_t retries_ = 0;  // interrupted or without progress, in a row
  unsigned engine_;
  std::byte* bounce_ = nullptr;  // held from take_bounce() to end()
  std::byte* target_ = nullptr;  // where the request in flight started
  std::exception_ptr error_;     // of a Failing piece
};

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "pagoda/base/bytes.h"
#include "pagoda/io/block_sums.h"
#include "pagoda/io/extent_allocator.h"
#include "pagoda/io/owner_process.h"

namespace pagoda::io {

/// A range of a swap space and what is known of its blocks. Kept alive by its Extent and by every
/// transfer in flight, so that space is never handed out again under a running write.
struct ExtentState {
  /// `sum_memory` counts what the checksums of all extents take.
  ExtentState(std::shared_ptr<ExtentAllocator> from, Bytes at, Bytes size, Bytes checksum_block,
              std::shared_ptr<std::atomic<Bytes>> sum_memory);
  ExtentState(const ExtentState&) = delete;
  ExtentState& operator=(const ExtentState&) = delete;
  ~ExtentState();

  const std::shared_ptr<ExtentAllocator> allocator;
  const Bytes begin;   // in the space
  const Bytes length;  // as asked for; the space taken is rounded up
  BlockSums sums;      // its own comment says what guards it
  const std::shared_ptr<std::atomic<Bytes>> sum_memory;
  const OwnerProcess owner;

  Bytes end() const noexcept { return begin + length; }
};

/// Space on disk that belongs to whoever holds this. Move-only; gives the space back when it goes
/// and the last transfer on it has ended. May outlive its SwapSpace, as an empty shell.
///
/// A value of one owner, not thread-safe; different threads may transfer to and from one extent.
class Extent {
 public:
  /// Holds nothing.
  Extent() = default;
  explicit Extent(std::shared_ptr<ExtentState> state) noexcept : state_(std::move(state)) {}
  Extent(Extent&&) noexcept = default;
  Extent& operator=(Extent&&) noexcept = default;

  explicit operator bool() const noexcept { return state_ != nullptr; }
  /// Bytes, as asked for.
  Bytes length() const noexcept { return state_ != nullptr ? state_->length : 0; }
  /// Where it lies in its space.
  Bytes offset() const noexcept { return state_ != nullptr ? state_->begin : 0; }

 private:
  friend class SwapSpace;
  std::shared_ptr<ExtentState> state_;
};

}  // namespace pagoda::io

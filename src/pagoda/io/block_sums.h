// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagoda/base/bytes.h"

namespace pagoda::io {

/// What is known of a block's contents. One byte a block beside the eight of its checksum.
enum class BlockState : std::uint8_t {
  Unwritten,  ///< nothing was put there since the extent was allocated
  Written,    ///< its checksum is that of what was written
  Lost,       ///< a write failed half-way: the contents are unknown until it is written whole
};

/// The checksums of one extent's blocks.
///
/// Blocks lie on the space's grid of `block` bytes, cut off at the extent's ends, so no two extents
/// share one. An entry is guarded by its block's claim in BlockLocks: read under a shared one,
/// written under an exclusive one.
class BlockSums {
 public:
  /// None at all: checksums are off.
  BlockSums() = default;
  /// For the extent [begin, begin + length) of the space.
  BlockSums(Bytes begin, Bytes length, Bytes block);

  bool enabled() const noexcept { return block_ != 0; }
  /// Memory taken.
  Bytes bytes() const noexcept;

  /// The block that holds byte `position` of the space.
  std::size_t index(Bytes position) const noexcept {
    return static_cast<std::size_t>(position / block_ - first_);
  }
  BlockState state(std::size_t index) const noexcept { return states_[index]; }
  std::uint64_t sum(std::size_t index) const noexcept { return sums_[index]; }

  void set_written(std::size_t index, std::uint64_t sum) noexcept;
  void set_lost(std::size_t index) noexcept { states_[index] = BlockState::Lost; }

 private:
  Bytes block_ = 0;
  Bytes first_ = 0;  // index of the extent's first block in the space
  std::vector<std::uint64_t> sums_;
  std::vector<BlockState> states_;
};

}  // namespace pagoda::io

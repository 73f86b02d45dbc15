// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/block_sums.h"

namespace pagoda::io {

BlockSums::BlockSums(Bytes begin, Bytes length, Bytes block)
    : block_(block), first_(begin / block) {
  if (length == 0) return;
  const Bytes last = (begin + length - 1) / block;
  sums_.resize(last - first_ + 1);
  states_.resize(sums_.size(), BlockState::Unwritten);
}

Bytes BlockSums::bytes() const noexcept {
  return sums_.size() * (sizeof(std::uint64_t) + sizeof(BlockState));
}

void BlockSums::set_written(std::size_t index, std::uint64_t sum) noexcept {
  sums_[index] = sum;
  states_[index] = BlockState::Written;
}

}  // namespace pagoda::io

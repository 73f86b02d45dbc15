// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/extent.h"

namespace pagoda::io {

ExtentState::ExtentState(std::shared_ptr<ExtentAllocator> from, Bytes at, Bytes size,
                         Bytes checksum_block)
    : allocator(std::move(from)), begin(at), length(size) {
  if (checksum_block > 0) sums = BlockSums(begin, length, checksum_block);
}

ExtentState::~ExtentState() {
  // In a forked child the allocator's mutex may be held by a thread that is not there.
  if (owner.here()) allocator->free(begin, length);
}

}  // namespace pagoda::io

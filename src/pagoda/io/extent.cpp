// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/extent.h"

namespace pagoda::io {

ExtentState::ExtentState(std::shared_ptr<ExtentAllocator> from, Bytes at, Bytes size,
                         Bytes checksum_block, std::shared_ptr<std::atomic<Bytes>> counter)
    : allocator(std::move(from)), begin(at), length(size), sum_memory(std::move(counter)) {
  if (checksum_block > 0) sums = BlockSums(begin, length, checksum_block);
  sum_memory->fetch_add(sums.bytes(), std::memory_order_relaxed);
}

ExtentState::~ExtentState() {
  // In a forked child the allocator's mutex may be held by a thread that is not there.
  if (!owner.here()) return;
  sum_memory->fetch_sub(sums.bytes(), std::memory_order_relaxed);
  allocator->free(begin, length);
}

}  // namespace pagoda::io

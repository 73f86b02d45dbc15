// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::io {

/// A fixed set of aligned buffers for what cannot go straight to the caller's memory.
///
/// Nobody blocks here: who finds no buffer waits in line and comes back from the release() that
/// frees one. All members may be called from any thread; after construction nothing allocates.
class BouncePool {
 public:
  /// Somebody in line.
  struct Waiter {
   private:
    friend class BouncePool;
    Waiter* next_ = nullptr;  // guarded by mutex_
  };

  BouncePool(std::size_t count, Bytes size);
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  /// A buffer, or null: then `waiter` is in line.
  std::byte* acquire(Waiter& waiter) noexcept;
  /// Gives `buffer` back. The waiter returned, if any, has it now.
  Waiter* release(std::byte* buffer) noexcept;

  /// All of it, for registration with an engine.
  std::span<std::byte> memory() noexcept { return memory_.span(); }

 private:
  AlignedBuffer memory_;
  RankedMutex<LockRank::BouncePool> mutex_;
  std::vector<std::byte*> free_;  // guarded by mutex_
  Waiter* first_ = nullptr;       // guarded by mutex_
  Waiter* last_ = nullptr;        // guarded by mutex_; meaningless when first_ is null
};

}  // namespace pagoda::io

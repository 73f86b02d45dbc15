// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

#include "pagoda/base/bytes.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::io {

/// Keeps pieces that touch the same blocks out of each other's way: readers together, a writer
/// alone, whoever came first first (docs/notes/swap.md, "Order").
///
/// Nobody blocks here: a claim that cannot be granted waits in line and comes back from the
/// release() that makes room for it. All members may be called from any thread; nothing allocates.
class BlockLocks {
 public:
  /// A range of blocks that somebody wants. Its owner keeps it in place from acquire() to
  /// release().
  struct Claim {
    Bytes begin = 0;
    Bytes end = 0;
    bool exclusive = false;

   private:
    friend class BlockLocks;
    bool granted_ = false;       // guarded by the bucket's mutex
    Claim* previous_ = nullptr;  // guarded by the bucket's mutex
    Claim* next_ = nullptr;      // guarded by the bucket's mutex
    Claim* answer_ = nullptr;    // the next one in release()'s answer; whoever got it owns it
  };

  /// Claims must not cross a multiple of `cell`.
  explicit BlockLocks(Bytes cell) : cell_(cell) {}
  BlockLocks(const BlockLocks&) = delete;
  BlockLocks& operator=(const BlockLocks&) = delete;

  /// True: granted now. False: a later release() hands the claim out.
  bool acquire(Claim& claim) noexcept;

  /// Ends a granted claim. Returns the claims granted by that, chained by next().
  Claim* release(Claim& claim) noexcept;
  static Claim* next(const Claim& claim) noexcept { return claim.answer_; }

 private:
  struct Bucket {
    RankedMutex<LockRank::BlockLocks> mutex;
    Claim* first = nullptr;  // guarded by mutex; claims in order of arrival
    Claim* last = nullptr;   // guarded by mutex
  };

  Bucket& bucket_of(const Claim& claim) noexcept;
  /// Whether somebody who came before `claim` is in its way.
  static bool must_wait(const Claim& claim, const RankedGuard<LockRank::BlockLocks>& lock) noexcept;

  const Bytes cell_;
  std::array<Bucket, 256> buckets_;  // by cell; two cells in one bucket do no harm
};

}  // namespace pagoda::io

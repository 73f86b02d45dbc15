// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/block_locks.h"

namespace pagoda::io {

BlockLocks::Bucket& BlockLocks::bucket_of(const Claim& claim) noexcept {
  return buckets_[(claim.begin / cell_) % buckets_.size()];
}

bool BlockLocks::must_wait(const Claim& claim, const RankedGuard<LockRank::BlockLocks>&) noexcept {
  for (const Claim* other = claim.previous_; other != nullptr; other = other->previous_) {
    const bool overlap = other->begin < claim.end && claim.begin < other->end;
    if (overlap && (other->exclusive || claim.exclusive)) return true;
  }
  return false;
}

bool BlockLocks::acquire(Claim& claim) noexcept {
  Bucket& bucket = bucket_of(claim);
  const std::lock_guard lock(bucket.mutex);
  claim.previous_ = bucket.last;
  claim.next_ = nullptr;
  (bucket.last != nullptr ? bucket.last->next_ : bucket.first) = &claim;
  bucket.last = &claim;
  claim.granted_ = !must_wait(claim, lock);
  return claim.granted_;
}

BlockLocks::Claim* BlockLocks::release(Claim& claim) noexcept {
  Bucket& bucket = bucket_of(claim);
  const std::lock_guard lock(bucket.mutex);
  (claim.previous_ != nullptr ? claim.previous_->next_ : bucket.first) = claim.next_;
  (claim.next_ != nullptr ? claim.next_->previous_ : bucket.last) = claim.previous_;
  Claim* head = nullptr;
  Claim** tail = &head;
  // Only those behind it can have waited for it. They stay in line until they are released.
  for (Claim* other = claim.next_; other != nullptr; other = other->next_) {
    if (other->granted_ || must_wait(*other, lock)) continue;
    other->granted_ = true;
    other->answer_ = nullptr;
    *tail = other;
    tail = &other->answer_;
  }
  return head;
}

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/bounce_pool.h"

#include <sys/mman.h>

#include "pagoda/base/error.h"

namespace pagoda::io {

BouncePool::BouncePool(std::size_t count, Bytes size)
    : memory_(count * size, AlignedBuffer::kDefaultAlignment, AlignedBuffer::Pages::Huge) {
  PAGODA_REQUIRE_GT(count, 0U, "unaligned transfers need at least one bounce buffer");
  // A fork in mid-transfer must not copy-on-write these pages away from under the disk. They are a
  // mapping of their own, so no other memory is lost to the child.
  ::madvise(memory_.data(), memory_.size(), MADV_DONTFORK);
  free_.reserve(count);
  for (std::size_t i = count; i > 0; --i) free_.push_back(memory_.data() + (i - 1) * size);
}

std::byte* BouncePool::acquire(Waiter& waiter) noexcept {
  const std::lock_guard lock(mutex_);
  if (!free_.empty()) {
    std::byte* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  waiter.next_ = nullptr;
  (first_ == nullptr ? first_ : last_->next_) = &waiter;
  last_ = &waiter;
  return nullptr;
}

BouncePool::Waiter* BouncePool::release(std::byte* buffer) noexcept {
  const std::lock_guard lock(mutex_);
  if (first_ != nullptr) {
    Waiter* waiter = first_;
    first_ = waiter->next_;
    return waiter;
  }
  free_.push_back(buffer);
  return nullptr;
}

}  // namespace pagoda::io

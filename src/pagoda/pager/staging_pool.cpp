// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/staging_pool.h"

#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::pager {

StagingPool::Buffer::Buffer(Buffer&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), bytes_(std::exchange(other.bytes_, {})) {}

StagingPool::Buffer& StagingPool::Buffer::operator=(Buffer&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

StagingPool::Buffer::~Buffer() {
  if (pool_ != nullptr) pool_->give_back(bytes_);
}

StagingPool::StagingPool(HostMemory& memory, std::size_t count, Bytes each, std::string_view name)
    : each_(each) {
  for (std::size_t i = 0; i < count; ++i) {
    memory_.push_back(memory.allocate(each, tag::kStaging, name));
    free_.emplace_back(memory_.back().data(), each);
  }
}

StagingPool::Buffer StagingPool::take() {
  std::unique_lock lock(mutex_);
  PAGODA_CHECK(!memory_.empty(), "a pool without buffers was asked for one");
  freed_.wait(lock, [&] { return !free_.empty(); });
  const std::span<std::byte> bytes = free_.back();
  free_.pop_back();
  return Buffer(this, bytes);
}

void StagingPool::give_back(std::span<std::byte> bytes) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(bytes);  // has room: it was there before
  freed_.notify_one();
}

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/pager/host_memory.h"

namespace pagoda::pager {

/// A fixed number of host buffers of one size, of the host's budget: whoever needs one waits until
/// one is free, so that what passes through takes no more memory than this, however many ask. Any
/// thread.
class StagingPool {
 public:
  /// A buffer of the pool, given back when it goes. Move-only; does not outlive the pool.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;
    ~Buffer();
    /// All of it.
    std::span<std::byte> bytes() const noexcept { return bytes_; }

   private:
    friend class StagingPool;
    Buffer(StagingPool* pool, std::span<std::byte> bytes) : pool_(pool), bytes_(bytes) {}

    StagingPool* pool_ = nullptr;
    std::span<std::byte> bytes_;
  };

  /// No buffers: take() must not be called.
  StagingPool() = default;
  StagingPool(HostMemory& memory, std::size_t count, Bytes each, std::string_view name);
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  Bytes each() const noexcept { return each_; }
  Buffer take();

 private:
  void give_back(std::span<std::byte> bytes) noexcept;

  const Bytes each_ = 0;
  std::vector<HostBlock> memory_;
  RankedMutex<LockRank::StagingPool> mutex_;
  Condition freed_;
  std::vector<std::span<std::byte>> free_;  // guarded by mutex_
};

}  // namespace pagoda::pager

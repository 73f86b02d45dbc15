// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/large_blocks.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include "pagoda/base/error.h"
#include "pagoda/base/page_mapping.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::torch {
namespace {

constexpr Bytes kNothingIsLarge = std::numeric_limits<Bytes>::max();
constexpr Bytes kStep = 64_KiB;  // sizes that differ by less share mappings
constexpr Bytes kWaste = 8;      // a mapping may be larger by one part in so many

/// Torch's allocator of host memory from the first LargeBlocks on.
class MappingAllocator final : public c10::Allocator {
 public:
  static MappingAllocator& instance() {
    static auto* allocator = new MappingAllocator;  // tensors may outlast main()
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (bytes >= large_.load(std::memory_order_relaxed)) data = take(align_up(bytes, kStep));
    if (data == nullptr) {
      c10::DataPtr other = before_->allocate(bytes);
      // All of an allocator's memory has its deleter: by that one tells it from others'.
      (void)other.compare_exchange_deleter(before_->raw_deleter(), &give_back);
      return other;
    }
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void begin() {
    const std::lock_guard lock(mutex_);
    ++scopes_;
    large_.store(LargeBlocks::kLarge, std::memory_order_relaxed);
  }

  void end() {
    Mappings gone;
    const std::lock_guard lock(mutex_);
    if (--scopes_ > 0) return;
    large_.store(kNothingIsLarge, std::memory_order_relaxed);
    drop_beyond(0, gone);
  }

  Bytes kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }

 private:
  using Mappings = std::list<PageMapping>;

  MappingAllocator() : before_(c10::GetCPUAllocator()) {
    // A fork must not find the lock taken by a thread that the child does not have.
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { instance().mutex_.unlock(); });
    c10::SetCPUAllocator(this, std::numeric_limits<std::uint8_t>::max());
  }

  /// Null where nothing can be mapped.
  void* take(Bytes bytes) noexcept {
    try {
      Mappings taken;
      {
        const std::lock_guard lock(mutex_);
        auto best = free_.end();
        for (auto at = free_.begin(); at != free_.end(); ++at) {
          if (at->size() < bytes || at->size() - bytes > bytes / kWaste) continue;
          if (best == free_.end() || at->size() < best->size()) best = at;
        }
        if (best != free_.end()) {
          kept_ -= best->size();
          taken.splice(taken.end(), free_, best);
        }
      }
      if (taken.empty()) {
        const bool huge = bytes >= PageMapping::kHugePage;
        taken.emplace_back(bytes, huge ? PageMapping::kHugePage : PageMapping::kPage);
      }
      void* data = taken.front().data();
      const std::lock_guard lock(mutex_);
      used_[data] = taken.begin();
      in_use_.splice(in_use_.end(), taken);
      return data;
    } catch (const std::exception&) {  // torch's own allocator says what is missing
      return nullptr;
    }
  }

  static void give_back(void* data) {
    MappingAllocator& all = instance();
    const bool may_be_mapped = reinterpret_cast<std::uintptr_t>(data) % PageMapping::kPage == 0;
    if (!may_be_mapped || !all.forget(data)) {
      all.before_->raw_deallocate(data);
      return;
    }
    c10::profiledCPUMemoryReporter().Delete(data);
  }

  /// Whether it was one of these.
  bool forget(void* data) {
    Mappings gone;  // unmapped without the lock
    const std::lock_guard lock(mutex_);
    const auto found = used_.find(data);
    if (found == used_.end()) return false;
    kept_ += found->second->size();
    free_.splice(free_.begin(), in_use_, found->second);
    used_.erase(found);
    drop_beyond(scopes_ == 0 ? 0 : LargeBlocks::kKept, gone);
    return true;
  }

  /// Holds mutex_. What was given back longest ago goes first.
  void drop_beyond(Bytes most, Mappings& gone) noexcept {
    while (kept_ > most) {
      kept_ -= free_.back().size();
      gone.splice(gone.end(), free_, std::prev(free_.end()));
    }
  }

  c10::Allocator* const before_;
  std::atomic<Bytes> large_{kNothingIsLarge};
  RankedMutex<LockRank::LargeBlocks> mutex_;
  std::size_t scopes_ = 0;                              // guarded by mutex_
  Mappings in_use_;                                     // guarded by mutex_
  Mappings free_;                                       // guarded by mutex_; latest first
  std::unordered_map<void*, Mappings::iterator> used_;  // guarded by mutex_; into in_use_
  Bytes kept_ = 0;                                      // guarded by mutex_: of free_
};

}  // namespace

LargeBlocks::LargeBlocks() {
  MappingAllocator::instance().begin();
}

LargeBlocks::~LargeBlocks() {
  MappingAllocator::instance().end();
}

Bytes LargeBlocks::kept() {
  return MappingAllocator::instance().kept();
}

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/host_pages.h"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <thread>

#include <sys/mman.h>

#include "pagoda/base/log.h"
#include "pagoda/base/thread_pool.h"

namespace pagoda::device {
namespace {

constexpr Bytes kGrain = 32_MiB;          // one task's share of the touching
constexpr std::size_t kMaxTouchers = 16;  // beyond, the kernel's zeroing is bound by memory

}  // namespace

HostPages::HostPages(Bytes size, Touch touch, ThreadPool* touchers)
    : size_(size),
      pages_(size, size < PageMapping::kHugePage ? PageMapping::kPage : PageMapping::kHugePage) {
  if (size == 0) return;
  if (::madvise(data(), mapped(), MADV_DONTFORK) != 0) {
    log::warn("device", "forked children will see the arena's pages", {{"errno", errno}});
  }
  if (touch == Touch::Now) touch_all(touchers);
}

void HostPages::touch_all(ThreadPool* touchers) {
  const auto touch = [this](std::size_t begin, std::size_t end) {
    for (Bytes at = begin; at < end; at += PageMapping::kPage) {
      *static_cast<volatile std::byte*>(data() + at) = std::byte{0};
    }
  };
  if (mapped() <= kGrain) {
    touch(0, mapped());
    return;
  }
  std::optional<ThreadPool> own;
  if (touchers == nullptr) {
    const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    own.emplace(std::min(cores, kMaxTouchers), "touch");
    touchers = &*own;
  }
  touchers->parallel_for(0, mapped(), kGrain, touch);
}

}  // namespace pagoda::device

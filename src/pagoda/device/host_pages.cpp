// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/host_pages.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <optional>
#include <system_error>
#include <thread>

#include <sys/mman.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/thread_pool.h"

namespace pagoda::device {
namespace {

constexpr Bytes kPage = 4_KiB;
constexpr Bytes kHugePage = 2_MiB;
constexpr Bytes kGrain = 32_MiB;          // one task's share of the touching
constexpr std::size_t kMaxTouchers = 16;  // beyond, the kernel's zeroing is bound by memory

/// Maps too much and cuts both ends off, so that huge pages fit from the first byte.
std::byte* map_aligned(Bytes size, Bytes alignment) {
  const Bytes total = size + alignment;
  void* raw = ::mmap(nullptr, total, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    const int error = errno;
    throw EngineError("out of host memory",
                      {context("bytes", size), context("errno", error),
                       context("cause", std::generic_category().message(error))});
  }
  auto* base = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  const Bytes head = align_up(address, alignment) - address;
  const Bytes tail = total - head - size;
  if (head > 0) ::munmap(base, head);
  if (tail > 0) ::munmap(base + head + size, tail);
  return base + head;
}

}  // namespace

HostPages::HostPages(Bytes size, Touch touch, ThreadPool* touchers)
    : size_(size), mapped_(align_up(size, kPage)) {
  PAGODA_REQUIRE_LE(size, std::numeric_limits<Bytes>::max() / 4, "no machine has this much memory");
  if (size == 0) return;
  data_ = map_aligned(mapped_, mapped_ < kHugePage ? kPage : kHugePage);
  // Advice only: a kernel without huge pages gives small ones.
  ::madvise(data_, mapped_, MADV_HUGEPAGE);
  if (::madvise(data_, mapped_, MADV_DONTFORK) != 0) {
    log::warn("device", "forked children will see the arena's pages", {{"errno", errno}});
  }
  try {
    if (touch == Touch::Now) touch_all(touchers);
  } catch (...) {
    ::munmap(data_, mapped_);
    throw;
  }
}

HostPages::~HostPages() {
  if (data_ != nullptr) ::munmap(data_, mapped_);
}

void HostPages::touch_all(ThreadPool* touchers) {
  const auto touch = [this](std::size_t begin, std::size_t end) {
    for (Bytes at = begin; at < end; at += kPage) {
      *static_cast<volatile std::byte*>(data_ + at) = std::byte{0};
    }
  };
  if (mapped_ <= kGrain) {
    touch(0, mapped_);
    return;
  }
  std::optional<ThreadPool> own;
  if (touchers == nullptr) {
    const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    own.emplace(std::min(cores, kMaxTouchers), "touch");
    touchers = &*own;
  }
  touchers->parallel_for(0, mapped_, kGrain, touch);
}

}  // namespace pagoda::device

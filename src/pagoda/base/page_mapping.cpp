// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/page_mapping.h"

#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include <sys/mman.h>

#include "pagoda/base/memory_limit.h"
#include "pagoda/base/out_of_memory.h"

namespace pagoda {

PageMapping::PageMapping(Bytes bytes, Bytes alignment) {
  PAGODA_REQUIRE_LE(bytes, std::numeric_limits<Bytes>::max() / 4,
                    "no machine has this much memory");
  if (bytes == 0) return;
  const Bytes size = align_up(bytes, kPage);
  // Maps too much and cuts both ends off, so that the alignment holds from the first byte.
  const Bytes total = size + alignment;
  void* raw = ::mmap(nullptr, total, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    const int error = errno;
    throw OutOfMemory(refused_memory(size),
                      {context("bytes", size), context("errno", error),
                       context("cause", std::generic_category().message(error))});
  }
  auto* base = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  const Bytes head = align_up(address, alignment) - address;
  const Bytes tail = total - head - size;
  if (head > 0) ::munmap(base, head);
  if (tail > 0) ::munmap(base + head + size, tail);
  data_ = base + head;
  size_ = size;
  ::madvise(data_, size_, MADV_HUGEPAGE);  // advice only: a kernel without them gives small ones
}

PageMapping::PageMapping(PageMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PageMapping& PageMapping::operator=(PageMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PageMapping::~PageMapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace pagoda

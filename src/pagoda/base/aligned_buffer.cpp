// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/aligned_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include <sys/mman.h>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

constexpr Bytes kHugePage = 2_MiB;

/// Maps `size` bytes at a multiple of `alignment` by mapping too much and cutting both ends off.
std::byte* map_aligned(Bytes size, Bytes alignment) {
  const Bytes total = size + alignment;
  void* raw = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* base = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  const Bytes head = align_up(address, alignment) - address;
  const Bytes tail = total - head - size;
  if (head > 0) ::munmap(base, head);
  if (tail > 0) ::munmap(base + head + size, tail);
  return base + head;
}

}  // namespace

AlignedBuffer::AlignedBuffer(Bytes size, Bytes alignment, Pages pages) : size_(size) {
  PAGODA_REQUIRE(is_power_of_two(alignment), "alignment {} is not a power of two", alignment);
  PAGODA_REQUIRE_LE(size, std::numeric_limits<Bytes>::max() / 4, "no machine has this much memory");
  if (size == 0) return;
  if (pages == Pages::Huge) {
    mapped_ = align_up(size, kHugePage);
    data_ = map_aligned(mapped_, std::max(alignment, kHugePage));
    // Advice only: a kernel without huge pages gives small ones.
    if (data_ != nullptr) ::madvise(data_, mapped_, MADV_HUGEPAGE);
  } else {
    const Bytes heap_alignment = std::max<Bytes>(alignment, alignof(std::max_align_t));
    data_ =
        static_cast<std::byte*>(std::aligned_alloc(heap_alignment, align_up(size, heap_alignment)));
  }
  if (data_ == nullptr) {
    throw EngineError("out of host memory", {context("bytes", size)});
  }
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    mapped_ = std::exchange(other.mapped_, 0);
  }
  return *this;
}

AlignedBuffer::~AlignedBuffer() {
  reset();
}

void AlignedBuffer::reset() noexcept {
  if (mapped_ > 0) {
    ::munmap(data_, mapped_);
  } else {
    std::free(data_);
  }
  data_ = nullptr;
  size_ = mapped_ = 0;
}

}  // namespace pagoda

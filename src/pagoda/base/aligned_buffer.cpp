// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/aligned_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "pagoda/base/memory_limit.h"
#include "pagoda/base/out_of_memory.h"

namespace pagoda {

AlignedBuffer::AlignedBuffer(Bytes size, Bytes alignment, Pages pages) : size_(size) {
  PAGODA_REQUIRE(is_power_of_two(alignment), "alignment {} is not a power of two", alignment);
  PAGODA_REQUIRE_LE(size, std::numeric_limits<Bytes>::max() / 4, "no machine has this much memory");
  if (size == 0) return;
  if (pages == Pages::Huge) {
    // Not rounded up to a huge page: whoever counts the buffer counts `size`.
    pages_ = PageMapping(size, std::max(alignment, PageMapping::kHugePage));
    data_ = pages_.data();
  } else {
    const Bytes heap_alignment = std::max<Bytes>(alignment, alignof(std::max_align_t));
    data_ =
        static_cast<std::byte*>(std::aligned_alloc(heap_alignment, align_up(size, heap_alignment)));
  }
  if (data_ == nullptr) {
    throw OutOfMemory(refused_memory(size), {context("bytes", size)});
  }
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      pages_(std::move(other.pages_)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    pages_ = std::move(other.pages_);
  }
  return *this;
}

AlignedBuffer::~AlignedBuffer() {
  reset();
}

void AlignedBuffer::reset() noexcept {
  if (pages_.data() == nullptr) std::free(data_);
  pages_ = PageMapping();
  data_ = nullptr;
  size_ = 0;
}

}  // namespace pagoda

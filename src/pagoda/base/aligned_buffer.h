// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "pagoda/base/bytes.h"
#include "pagoda/base/page_mapping.h"

namespace pagoda {

/// Memory that starts at a multiple of `alignment`: for O_DIRECT transfers and vector kernels.
///
/// Owned and move-only. The contents are unspecified until written. With Pages::Huge the kernel is
/// asked for 2 MiB pages, which pays from a few megabytes on (fewer TLB misses, faster first
/// touch); where it has none the buffer is the same on small pages. Not thread-safe.
class AlignedBuffer {
 public:
  enum class Pages { Default, Huge };
  static constexpr Bytes kDefaultAlignment = 4096;  // the block size O_DIRECT asks for at most

  /// Empty: data() is null.
  AlignedBuffer() = default;
  explicit AlignedBuffer(Bytes size, Bytes alignment = kDefaultAlignment,
                         Pages pages = Pages::Default);
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  ~AlignedBuffer();

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  Bytes size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  std::span<std::byte> span() noexcept { return {data_, size_}; }
  std::span<const std::byte> span() const noexcept { return {data_, size_}; }

  /// The buffer as an array of T; what does not fill a T at the end is left out.
  template <class T>
  std::span<T> as() noexcept {
    return {reinterpret_cast<T*>(data_), size_ / sizeof(T)};
  }

 private:
  void reset() noexcept;

  std::byte* data_ = nullptr;
  Bytes size_ = 0;
  PageMapping pages_;  // empty when the memory came from the heap
};

}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "pagoda/base/bytes.h"

namespace pagoda {

/// Private zeroed pages of the process at a multiple of an alignment, huge ones where the kernel
/// has them. Owned and move-only; not thread-safe.
class PageMapping {
 public:
  static constexpr Bytes kPage = 4_KiB;
  static constexpr Bytes kHugePage = 2_MiB;

  /// Nothing: data() is null.
  PageMapping() = default;
  /// At least `bytes`, rounded up to a page; nothing if it is 0. `alignment` is a power of two of a
  /// page or more. EngineError when there are no such addresses to be had.
  PageMapping(Bytes bytes, Bytes alignment);
  PageMapping(PageMapping&& other) noexcept;
  PageMapping& operator=(PageMapping&& other) noexcept;
  ~PageMapping();

  std::byte* data() const noexcept { return data_; }
  Bytes size() const noexcept { return size_; }

 private:
  std::byte* data_ = nullptr;
  Bytes size_ = 0;
};

}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "pagoda/base/bytes.h"
#include "pagoda/base/page_mapping.h"

namespace pagoda {
class ThreadPool;
}

namespace pagoda::device {

/// Pages of the host for an arena: huge where the kernel has them, touched by several threads so
/// that no later access faults, and absent in forked children (a DataLoader worker would otherwise
/// copy every page the parent writes).
///
/// Starts at a multiple of 2 MiB, or of 4 KiB when smaller than that, and covers no byte more than
/// its size rounded up to a page. Owned, not movable; made and destroyed on any thread.
class HostPages {
 public:
  /// Whether the pages are there when the constructor returns.
  enum class Touch { Now, Later };

  HostPages(Bytes size, Touch touch, ThreadPool* touchers);
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  std::byte* data() const noexcept { return pages_.data(); }
  Bytes size() const noexcept { return size_; }
  /// The whole pages under data(): what is registered with CUDA.
  Bytes mapped() const noexcept { return pages_.size(); }

 private:
  void touch_all(ThreadPool* touchers);

  Bytes size_;
  PageMapping pages_;
};

}  // namespace pagoda::device

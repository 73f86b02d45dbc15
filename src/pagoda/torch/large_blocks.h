// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/bytes.h"

namespace pagoda::torch {

/// While one lives, large tensors in the host's memory have mappings of their own.
///
/// Tensors of many sizes are made and dropped between small things that stay. In one heap the holes
/// that they leave are a little too small for the next tensor and are never given back: building a
/// model, a process would grow by its size although nothing of it is there, and training on the CPU
/// keeps once more what gradients and activations have ever taken. A mapping goes when its tensor
/// does, but for kKept bytes of them, so that the next gradient need not be mapped anew.
///
/// This stands before torch's allocator, once for the process, and hands on what is smaller, what
/// cannot be mapped, and everything while none lives. Any thread.
class LargeBlocks {
 public:
  /// What is large: fewer bytes are better off between their neighbours. With 1 MiB, batches whose
  /// activations were just below it left 20 to 40 MiB of holes in the heap.
  static constexpr Bytes kLarge = 256_KiB;
  /// Bytes of mappings that nobody uses, at most.
  static constexpr Bytes kKept = 32_MiB;

  LargeBlocks();
  LargeBlocks(const LargeBlocks&) = delete;
  LargeBlocks& operator=(const LargeBlocks&) = delete;
  ~LargeBlocks();

  /// What of kKept is taken now.
  static Bytes kept();
};

}  // namespace pagoda::torch

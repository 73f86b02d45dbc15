// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace pagoda::torch {

/// While one lives, the C library maps every large block on its own.
///
/// A model is built by making and dropping tensors of many sizes between small things that stay. In
/// one heap the holes that they leave are a little too small for the next tensor, and are never
/// given back: a process would grow by the size of the model although nothing of it is there.
/// Afterwards the thresholds are what the C library's own growing ones end at, for mapping each
/// block costs training on the CPU more than it saves. Any thread; of the process as a whole.
class LargeBlocksApart {
 public:
  LargeBlocksApart();
  LargeBlocksApart(const LargeBlocksApart&) = delete;
  LargeBlocksApart& operator=(const LargeBlocksApart&) = delete;
  ~LargeBlocksApart();
};

}  // namespace pagoda::torch

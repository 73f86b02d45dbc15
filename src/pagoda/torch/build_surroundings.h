// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Context.h>

#include "pagoda/torch/large_blocks.h"

namespace pagoda::torch {

/// What a model is built in, from C++ and from Python alike: large blocks apart, and no cuDNN, for
/// which recurrent layers would compare their weights' pointers, which are not there, and pack them
/// into one buffer. Scopes end in the reverse of their order.
class BuildSurroundings {
 public:
  BuildSurroundings() : cudnn_(at::globalContext().userEnabledCuDNN()) {
    at::globalContext().setUserEnabledCuDNN(false);
  }
  BuildSurroundings(const BuildSurroundings&) = delete;
  BuildSurroundings& operator=(const BuildSurroundings&) = delete;
  ~BuildSurroundings() { at::globalContext().setUserEnabledCuDNN(cudnn_); }

 private:
  const LargeBlocks apart_;
  const bool cudnn_;
};

}  // namespace pagoda::torch

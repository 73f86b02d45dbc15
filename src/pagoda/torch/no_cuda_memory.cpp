// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/error.h"
#include "pagoda/torch/cuda_memory.h"

namespace pagoda::torch {

std::shared_ptr<void> limit_cuda_memory(c10::Device /*device*/, Bytes /*limit*/, Bytes /*total*/) {
  throw UserError("device_limit needs CUDA, for which this build had no headers");
}

}  // namespace pagoda::torch

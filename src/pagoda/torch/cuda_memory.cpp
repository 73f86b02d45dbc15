// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/cuda_memory.h"

#include <algorithm>

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace pagoda::torch {

std::shared_ptr<void> limit_cuda_memory(c10::Device device, Bytes limit, Bytes total) {
  at::globalContext().lazyInitDevice(c10::kCUDA);  // which makes the allocator
  // By the allocator's virtual functions: nothing of torch's CUDA libraries is linked.
  auto* allocator =
      static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator*>(c10::GetAllocator(c10::kCUDA));
  const double before = allocator->getMemoryFraction(device.index());
  allocator->setMemoryFraction(
      std::min(1.0, static_cast<double>(limit) / static_cast<double>(total)), device.index());
  return {nullptr, [=](void*) { allocator->setMemoryFraction(before, device.index()); }};
}

}  // namespace pagoda::torch

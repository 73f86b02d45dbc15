// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "pagoda/device/device.h"
#include "pagoda/device/ordering_checker.h"

/// NVIDIA GPUs through the CUDA runtime, which is loaded at first use: the same program runs where
/// there is none. Shares the runtime and the primary context with torch. Where the runtime's
/// headers were not found at build time, no_cuda.cpp stands in.
namespace pagoda::device::cuda {

struct Options {
  /// Which GPU, as CUDA_VISIBLE_DEVICES numbers them.
  int index = 0;
  /// PAGODA_CHECK_ORDER=1 turns it on: a debug mode, for it takes a lock an operation.
  std::shared_ptr<OrderingChecker> checker = OrderingChecker::from_environment();
};

/// Whether make_device() can work; if not, `why` says what was tried.
bool available(std::string* why = nullptr);
/// How many GPUs there are; 0 where CUDA is not available.
int device_count();
/// UserError "CUDA is not available: …" where it is not.
std::shared_ptr<Device> make_device(Options options = {});

}  // namespace pagoda::device::cuda

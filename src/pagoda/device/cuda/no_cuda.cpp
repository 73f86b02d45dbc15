// SPDX-License-Identifier: Apache-2.0
// Stands in for the CUDA backend where its headers were not found at build time.
#include "pagoda/base/error.h"
#include "pagoda/device/cuda/cuda_device.h"

namespace pagoda::device::cuda {
namespace {

constexpr const char* kWhy = "this build was made without the CUDA runtime's headers";

}  // namespace

bool available(std::string* why) {
  if (why != nullptr) *why = kWhy;
  return false;
}

int device_count() {
  return 0;
}

std::shared_ptr<Device> make_device(Options) {
  throw UserError(fmt::format("CUDA is not available: {}", kWhy));
}

}  // namespace pagoda::device::cuda

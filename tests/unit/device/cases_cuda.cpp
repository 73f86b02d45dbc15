// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/cuda/cuda_device.h"
#include "unit/device/device_case.h"

namespace pagoda::device {

std::vector<DeviceCase> device_cases() {
  return {{"cuda", [](auto checker) { return cuda::make_device({.checker = checker}); },
           [] {
             std::string why;
             return cuda::available(&why) ? std::string() : "CUDA is not available: " + why;
           }}};
}

}  // namespace pagoda::device

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "unit/device/device_case.h"

namespace pagoda::device {
namespace {

std::string nothing() {
  return {};
}

std::shared_ptr<Device> slow(std::shared_ptr<OrderingChecker> checker) {
  const emulated::LinkOptions link{.bytes_per_second = 2e9, .latency = 50'000};
  return emulated::make_device({.name = "slow",
                                .host_to_device = link,
                                .device_to_host = link,
                                .device_to_device = link,
                                .memory = 1_GiB,
                                .checker = std::move(checker)});
}

}  // namespace

std::vector<DeviceCase> device_cases() {
  return {
      {"host", [](auto checker) { return host::make_device({.checker = checker}); }, nothing},
      {"emulated", [](auto checker) { return emulated::make_device({.checker = checker}); },
       nothing},
      {"emulated_slow", slow, nothing},
  };
}

}  // namespace pagoda::device

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "pagoda/device/device.h"
#include "pagoda/device/ordering_checker.h"

/// The device that is no device: plain memory, and streams whose work is done when the call
/// returns. What runs on it is right in order but shows nothing of overlap.
namespace pagoda::device::host {

struct Options {
  std::string name = "host";
  std::shared_ptr<OrderingChecker> checker = OrderingChecker::from_environment();
};

std::shared_ptr<Device> make_device(Options options = {});

}  // namespace pagoda::device::host

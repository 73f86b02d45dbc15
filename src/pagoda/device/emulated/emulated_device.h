// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "pagoda/base/bytes.h"
#include "pagoda/base/clock.h"
#include "pagoda/device/device.h"
#include "pagoda/device/emulated/link.h"
#include "pagoda/device/ordering_checker.h"

/// A device made of host memory, a thread a stream, and links of a set speed: what overlaps on an
/// accelerator overlaps here, on any machine.
///
/// A copy moves the first half of its bytes when it begins and the rest when it ends, so that work
/// which should have waited for it, or it for others, sees wrong bytes. Every operation is a slice
/// on a track named after its stream (base/trace.h).
namespace pagoda::device::emulated {

struct Options {
  std::string name = "emulated";
  LinkOptions host_to_device = {};
  LinkOptions device_to_host = {};
  LinkOptions device_to_device = {};
  /// The device's own memory: allocating beyond it fails.
  Bytes memory = 16_GiB;
  std::shared_ptr<OrderingChecker> checker = OrderingChecker::from_environment();
};

std::shared_ptr<Device> make_device(Options options = {});

/// A kernel that takes `duration` and does nothing else. For streams of any device.
void run_for(Stream& stream, Nanos duration, std::string_view label);

/// From now on the stream of an emulated device says that a graph is captured on it, or no longer.
void set_capturing(Stream& stream, bool capturing);

}  // namespace pagoda::device::emulated

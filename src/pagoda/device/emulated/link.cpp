// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/emulated/link.h"

#include <algorithm>

namespace pagoda::device::emulated {

Link::Slot Link::take(Bytes bytes, Nanos now) {
  Nanos transfer = 0;
  if (options_.bytes_per_second > 0) {
    transfer = static_cast<Nanos>(static_cast<double>(bytes) * 1e9 / options_.bytes_per_second);
  }
  const std::lock_guard lock(mutex_);
  const Nanos begin = std::max(now, free_at_);
  free_at_ = begin + transfer;
  return {begin, free_at_ + options_.latency};
}

}  // namespace pagoda::device::emulated

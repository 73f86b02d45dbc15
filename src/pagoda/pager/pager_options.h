// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

#include "pagoda/base/bytes.h"
#include "pagoda/pager/dropped_wait.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::pager {

struct PagerOptions {
  unsigned fetch_threads = 4;
  /// Host bytes each fetch thread may use on the way from disk or from other ranks.
  Bytes staging = 4_MiB;
  /// Pages of at least so many bytes have their rows looked up where they lie; 0: none.
  Bytes least_lookup = 0;
  int rank = 0;
  Sharding sharding;
  /// For messages: what the user writes to keep a page where raw pointers can see it.
  std::string pin_advice = "pin it (engine.pin)";
  /// How long a touch waits for this rank's own step(), where another rank has its behind it.
  std::chrono::duration<double> own_step{60};
  DroppedWait dropped_wait = DroppedWait::None;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/clock.h"

#include <thread>

namespace pagoda {

void sleep_until_ns(Nanos deadline) {
  constexpr Nanos kSpin = 100'000;  // timers wake up to this much late
  const Nanos wait = deadline - now_ns();
  if (wait > kSpin) std::this_thread::sleep_for(std::chrono::nanoseconds(wait - kSpin));
  while (now_ns() < deadline) std::this_thread::yield();
}

}  // namespace pagoda

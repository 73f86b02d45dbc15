// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

namespace pagoda {

/// Nanoseconds on the machine's monotonic clock: the one time base of traces, stats and emulation.
using Nanos = std::int64_t;

inline Nanos now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Returns at `deadline` or within a few microseconds after it: sleeps while it is far, then spins.
void sleep_until_ns(Nanos deadline);

/// Time since it was made or restarted.
class Stopwatch {
 public:
  void restart() noexcept { start_ = now_ns(); }
  Nanos elapsed_ns() const noexcept { return now_ns() - start_; }
  double seconds() const noexcept { return static_cast<double>(elapsed_ns()) * 1e-9; }

 private:
  Nanos start_ = now_ns();
};

}  // namespace pagoda

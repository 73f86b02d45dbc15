// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/fetch_rate.h"

#include <algorithm>

namespace pagoda::prefetch {

void FetchRate::add(Bytes bytes, double seconds) noexcept {
  if (bytes == 0 || !(seconds > 0)) return;
  const double keep = 1 - 1 / options_.memory;
  const double size = static_cast<double>(bytes);
  weight_ = weight_ * keep + 1;
  const double off_bytes = size - bytes_;
  const double off_seconds = seconds - seconds_;
  bytes_ += off_bytes / weight_;
  seconds_ += off_seconds / weight_;
  spread_ = spread_ * keep + off_bytes * (size - bytes_);
  both_ = both_ * keep + off_bytes * (seconds - seconds_);
}

/// Whether sizes differ enough, and times with them, to tell latency and bandwidth apart.
bool FetchRate::line() const noexcept {
  return spread_ > 0.01 * weight_ * bytes_ * bytes_ && both_ > 0;
}

/// Seconds a byte.
double FetchRate::slope() const noexcept {
  if (weight_ == 0) return 1 / options_.bandwidth;
  // A line that meets zero bytes below zero seconds says that all of it is bandwidth.
  const double through_zero = seconds_ / bytes_;
  return line() ? std::min(both_ / spread_, through_zero) : through_zero;
}

double FetchRate::bandwidth() const noexcept {
  return 1 / slope();
}

double FetchRate::latency() const noexcept {
  if (weight_ == 0) return options_.latency;
  return std::max(0.0, seconds_ - slope() * bytes_);
}

}  // namespace pagoda::prefetch

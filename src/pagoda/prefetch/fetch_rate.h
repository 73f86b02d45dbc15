// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/bytes.h"

namespace pagoda::prefetch {

/// What fetches cost here, measured: a latency and a bandwidth, by a straight line through the
/// samples, the recent ones counting most. One thread at a time.
class FetchRate {
 public:
  /// What is believed before the first samples.
  struct Options {
    double latency = 100e-6;  // seconds
    double bandwidth = 4e9;   // bytes a second
    /// How many samples the line follows.
    double memory = 64;
  };

  FetchRate() : FetchRate(Options{}) {}
  explicit FetchRate(const Options& options) : options_(options) {}

  /// A fetch of `bytes` took `seconds` from its start to its end. Samples without bytes or time are
  /// left out.
  void add(Bytes bytes, double seconds) noexcept;

  double latency() const noexcept;
  double bandwidth() const noexcept;
  /// Seconds that fetches of so many bytes, one after the other, will take.
  double seconds(Bytes bytes) const noexcept {
    return latency() + static_cast<double>(bytes) / bandwidth();
  }

 private:
  bool line() const noexcept;
  double slope() const noexcept;

  Options options_;
  // Weighted sums of the samples: count, mean bytes and seconds, spread of bytes, and both's.
  double weight_ = 0;
  double bytes_ = 0;
  double seconds_ = 0;
  double spread_ = 0;
  double both_ = 0;
};

}  // namespace pagoda::prefetch

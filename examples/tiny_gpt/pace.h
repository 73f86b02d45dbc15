// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pagoda/base/clock.h"
#include "pagoda/engine/stats.h"
#include "progress.h"

namespace tiny_gpt {

/// How far a run is and how fast it goes. One thread.
class Pace {
 public:
  /// The run is over after `steps` steps or, where that is 0, after `seconds`.
  Pace(std::int64_t steps, double seconds, std::int64_t tokens_a_step)
      : steps_(steps), seconds_(seconds), tokens_(tokens_a_step) {}

  bool over() const { return steps_ > 0 ? step_ == steps_ : clock_.seconds() >= seconds_; }
  /// One more step is done. `in_step` is time in which the program only waited for the engine,
  /// beside the waits that the engine counts itself.
  Status step(double loss, double in_step, const pagoda::engine::Stats& stats);

 private:
  const std::int64_t steps_;
  const double seconds_;
  const std::int64_t tokens_;
  pagoda::Stopwatch clock_;
  std::int64_t step_ = 0;
  double recent_loss_ = 0;  // one batch is small: the mean of the last ones
};

/// Seconds in which operators waited: for pages, for updates, or to hand a gradient over.
double seconds_waited(const pagoda::engine::Stats& stats);

}  // namespace tiny_gpt

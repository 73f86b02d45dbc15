// SPDX-License-Identifier: Apache-2.0
#include "pace.h"

namespace tiny_gpt {

double seconds_waited(const pagoda::engine::Stats& stats) {
  const pagoda::Nanos waited = stats.pager.fault_stall + stats.pager.late_stall +
                               stats.pager.update_stall + stats.gradients.push_stall;
  return static_cast<double>(waited) * 1e-9;
}

Status Pace::step(double loss, double in_step, const pagoda::engine::Stats& stats) {
  recent_loss_ = step_ == 0 ? loss : 0.9 * recent_loss_ + 0.1 * loss;
  ++step_;
  const double spent = clock_.seconds();
  const double per_step = spent / static_cast<double>(step_);
  return {.step = step_,
          .steps = steps_,
          .loss = recent_loss_,
          .tokens_per_second = static_cast<double>(tokens_) / per_step,
          .stall = (seconds_waited(stats) + in_step) / spent,
          .device = stats.tiers[0].used,
          .host = stats.tiers[1].used,
          .nvme = stats.tiers[2].used,
          .seconds_left =
              steps_ > 0 ? per_step * static_cast<double>(steps_ - step_) : seconds_ - spent};
}

}  // namespace tiny_gpt

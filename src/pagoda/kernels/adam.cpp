// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/adam.h"

#include <cmath>

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/shard_driver.h"

namespace pagoda::kernels {
namespace {

/// In double, then rounded once. Not inlined: the arithmetic must stay behind step_with()'s
/// DefaultFloatEnvironment, which the compiler does not know to depend on it.
[[gnu::noinline]] AdamScalars scalars_of(const AdamConfig& c, const Step& step) {
  const bool l2 = c.decay == Decay::L2 && c.weight_decay != 0;
  AdamScalars s{};
  s.grad_scale = static_cast<float>(step.grad_scale);
  s.l2 = l2 ? static_cast<float>(c.weight_decay) : 0.0F;
  s.keep = c.decay == Decay::L2 ? 1.0F : static_cast<float>(1 - c.lr * c.weight_decay);
  s.beta1 = static_cast<float>(c.beta1);
  s.rest1 = static_cast<float>(1 - c.beta1);
  s.beta2 = static_cast<float>(c.beta2);
  s.rest2 = static_cast<float>(1 - c.beta2);
  s.step_size = static_cast<float>(c.lr / (1 - power(c.beta1, step.number)));
  s.unbias2 = static_cast<float>(1 / std::sqrt(1 - power(c.beta2, step.number)));
  s.eps = static_cast<float>(c.eps);
  s.has_l2 = l2;
  return s;
}

void check(const AdamConfig& c, const Step& step, const OptimizerShard& shard) {
  check_range("lr", c.lr, 0, kHuge);
  check_range("beta1", c.beta1, 0, 1);
  check_range("beta2", c.beta2, 0, 1);
  check_range("eps", c.eps, 0, kHuge);
  check_range("weight_decay", c.weight_decay, 0, kHuge);
  check_shard(shard, step, Needs::MomentumAndVariance, true);
}

}  // namespace

void adam_step(const AdamConfig& config, const Step& step, const OptimizerShard& shard, Isa isa) {
  check(config, step, shard);
  step_with(scalars_of, kernels_for(isa).adam, config, step, shard);
}

void adam_step(const AdamConfig& config, const Step& step, const OptimizerShard& shard,
               ThreadPool& pool, Priority priority, Isa isa) {
  check(config, step, shard);
  for_pieces(shard, pool, priority,
             [&](const OptimizerShard& part) { adam_step(config, step, part, isa); });
}

}  // namespace pagoda::kernels

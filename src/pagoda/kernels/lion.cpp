// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/lion.h"

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/shard_driver.h"

namespace pagoda::kernels {
namespace {

/// Not inlined, as in adam.cpp.
[[gnu::noinline]] LionScalars scalars_of(const LionConfig& c, const Step& step) {
  LionScalars s{};
  s.grad_scale = static_cast<float>(step.grad_scale);
  s.keep = static_cast<float>(1 - c.lr * c.weight_decay);
  s.lr = static_cast<float>(c.lr);
  s.beta1 = static_cast<float>(c.beta1);
  s.rest1 = static_cast<float>(1 - c.beta1);
  s.beta2 = static_cast<float>(c.beta2);
  s.rest2 = static_cast<float>(1 - c.beta2);
  return s;
}

void check(const LionConfig& c, const Step& step, const OptimizerShard& shard) {
  check_range("lr", c.lr, 0, kHuge);
  check_range("beta1", c.beta1, 0, 1);
  check_range("beta2", c.beta2, 0, 1);
  check_range("weight_decay", c.weight_decay, 0, kHuge);
  check_shard(shard, step, Needs::Momentum, false);
}

}  // namespace

void lion_step(const LionConfig& config, const Step& step, const OptimizerShard& shard, Isa isa) {
  check(config, step, shard);
  step_with(scalars_of, kernels_for(isa).lion, config, step, shard);
}

void lion_step(const LionConfig& config, const Step& step, const OptimizerShard& shard,
               ThreadPool& pool, Priority priority, Isa isa) {
  check(config, step, shard);
  for_pieces(shard, pool, priority,
             [&](const OptimizerShard& part) { lion_step(config, step, part, isa); });
}

}  // namespace pagoda::kernels

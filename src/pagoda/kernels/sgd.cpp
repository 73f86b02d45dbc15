// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/sgd.h"

#include "pagoda/base/error.h"
#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/shard_driver.h"

namespace pagoda::kernels {
namespace {

/// Not inlined, as in adam.cpp.
[[gnu::noinline]] SgdScalars scalars_of(const SgdConfig& c, const Step& step) {
  const bool l2 = c.decay == Decay::L2 && c.weight_decay != 0;
  const bool first = step.number == 1;
  SgdScalars s{};
  s.grad_scale = static_cast<float>(step.grad_scale);
  s.l2 = l2 ? static_cast<float>(c.weight_decay) : 0.0F;
  s.keep = c.decay == Decay::L2 ? 1.0F : static_cast<float>(1 - c.lr * c.weight_decay);
  s.lr = static_cast<float>(c.lr);
  s.momentum = first ? 0.0F : static_cast<float>(c.momentum);
  s.input = first ? 1.0F : static_cast<float>(1 - c.dampening);
  s.lookahead = static_cast<float>(c.momentum);
  s.has_l2 = l2;
  s.nesterov = c.nesterov;
  return s;
}

void check(const SgdConfig& c, const Step& step, const OptimizerShard& shard) {
  check_range("lr", c.lr, 0, kHuge);
  check_range("momentum", c.momentum, 0, kHuge);
  check_range("dampening", c.dampening, -kHuge, kHuge);
  check_range("weight_decay", c.weight_decay, 0, kHuge);
  PAGODA_REQUIRE(!c.nesterov || (c.momentum > 0 && c.dampening == 0),
                 "nesterov needs a momentum and no dampening");
  check_shard(shard, step, c.momentum == 0 ? Needs::Nothing : Needs::Momentum, false);
}

}  // namespace

void sgd_step(const SgdConfig& config, const Step& step, const OptimizerShard& shard, Isa isa) {
  check(config, step, shard);
  step_with(scalars_of, kernels_for(isa).sgd, config, step, shard);
}

void sgd_step(const SgdConfig& config, const Step& step, const OptimizerShard& shard,
              ThreadPool& pool, Priority priority, Isa isa) {
  check(config, step, shard);
  for_pieces(shard, pool, priority,
             [&](const OptimizerShard& part) { sgd_step(config, step, part, isa); });
}

}  // namespace pagoda::kernels

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/thread_pool.h"
#include "pagoda/kernels/isa.h"
#include "pagoda/kernels/optimizer_shard.h"

namespace pagoda::kernels {

/// Adam and AdamW, as in torch.optim (no amsgrad):
///
///   g = grad_scale·g                     (+ weight_decay·p with Decay::L2)
///   p = p·(1 − lr·weight_decay)          (Decay::Decoupled)
///   m = β₁·m + (1 − β₁)·g;   v = β₂·v + (1 − β₂)·g²
///   p = p − lr/(1 − β₁ᵗ)·m / (√v/√(1 − β₂ᵗ) + ε)
///
/// docs/notes/numerics.md fixes the order of every operation and with it the bits.
struct AdamConfig {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  Decay decay = Decay::Decoupled;
};

/// One step over a shard: needs momentum and variance. Any thread; shards that do not overlap may
/// run at once. Throws UserError for a shard or a configuration that makes no sense.
void adam_step(const AdamConfig& config, const Step& step, const OptimizerShard& shard,
               Isa isa = active_isa());

/// The same on this thread and the pool's; the bits do not depend on their number.
void adam_step(const AdamConfig& config, const Step& step, const OptimizerShard& shard,
               ThreadPool& pool, Priority priority = Priority::Normal, Isa isa = active_isa());

}  // namespace pagoda::kernels

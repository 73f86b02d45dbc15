// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/thread_pool.h"
#include "pagoda/kernels/isa.h"
#include "pagoda/kernels/optimizer_shard.h"

namespace pagoda::kernels {

/// Lion (Chen et al., 2023), with decoupled decay:
///
///   g = grad_scale·g;   p = p·(1 − lr·weight_decay)
///   p = p − lr·sign(β₁·m + (1 − β₁)·g);   m = β₂·m + (1 − β₂)·g
///
/// sign(0) is 0, and a NaN makes the parameter NaN.
struct LionConfig {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;
};

/// One step over a shard: needs momentum, a whole master and no variance (there is no sign bit to
/// spare for a split one). Threads as in adam_step().
void lion_step(const LionConfig& config, const Step& step, const OptimizerShard& shard,
               Isa isa = active_isa());

/// The same on this thread and the pool's.
void lion_step(const LionConfig& config, const Step& step, const OptimizerShard& shard,
               ThreadPool& pool, Priority priority = Priority::Normal, Isa isa = active_isa());

}  // namespace pagoda::kernels

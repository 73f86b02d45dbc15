// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/thread_pool.h"
#include "pagoda/kernels/isa.h"
#include "pagoda/kernels/optimizer_shard.h"

namespace pagoda::kernels {

/// Stochastic gradient descent as in torch.optim.SGD:
///
///   g = grad_scale·g (+ weight_decay·p);   p = p·(1 − lr·weight_decay)   (as `decay` says)
///   b = momentum·b + (1 − dampening)·g     (b = g at step 1)
///   p = p − lr·b, or p − lr·(g + momentum·b) with nesterov
struct SgdConfig {
  double lr = 1e-2;
  double momentum = 0.9;
  double dampening = 0;
  double weight_decay = 0;
  Decay decay = Decay::L2;
  bool nesterov = false;
};

/// One step over a shard: needs a whole master, momentum unless that is 0 (then none), and no
/// variance. Threads as in adam_step().
void sgd_step(const SgdConfig& config, const Step& step, const OptimizerShard& shard,
              Isa isa = active_isa());

/// The same on this thread and the pool's.
void sgd_step(const SgdConfig& config, const Step& step, const OptimizerShard& shard,
              ThreadPool& pool, Priority priority = Priority::Normal, Isa isa = active_isa());

}  // namespace pagoda::kernels

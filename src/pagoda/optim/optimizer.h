// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string_view>
#include <variant>

#include "pagoda/kernels/adam.h"
#include "pagoda/kernels/lion.h"
#include "pagoda/kernels/sgd.h"

namespace pagoda {

/// AdamW, with torch's defaults.
struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// Adam, whose decay goes into the gradient; with torch's defaults.
struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

/// Stochastic gradient descent, with torch's defaults.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

/// Lion, with its paper's defaults.
struct Lion {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;
};

/// Which rule updates a group of parameters, with its constants.
using Optimizer = std::variant<AdamW, Adam, Sgd, Lion>;

}  // namespace pagoda

namespace pagoda::optim {

/// "adamw", "adam", "sgd" or "lion".
std::string_view name(const Optimizer& optimizer) noexcept;
double learning_rate(const Optimizer& optimizer) noexcept;
void set_learning_rate(Optimizer& optimizer, double lr) noexcept;
/// Throws UserError for constants with which no training makes sense: what torch.optim refuses, and
/// whatever is not finite.
void require_valid(const Optimizer& optimizer);

/// Arrays the rule keeps for each element.
bool has_momentum(const Optimizer& optimizer) noexcept;
bool has_variance(const Optimizer& optimizer) noexcept;

/// One step of the rule over a shard.
void apply(const Optimizer& optimizer, const kernels::Step& step,
           const kernels::OptimizerShard& shard, ThreadPool& pool);
/// The same over many, which may be small.
void apply(const Optimizer& optimizer, const kernels::Step& step,
           std::span<const kernels::OptimizerShard> shards, ThreadPool& pool);

}  // namespace pagoda::optim

// SPDX-License-Identifier: Apache-2.0
// The reference: what training without paging, sharding or threads gives, bit for bit. Includes no
// torch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "pagoda/kernels/adam.h"
#include "pagoda/kernels/lion.h"
#include "pagoda/kernels/sgd.h"
#include "torch/zoo.h"

namespace zoo {

/// fp16: the loss is multiplied by a scale that follows what the gradients bear.
struct LossScale {
  double initial = 65536;
  int growth_window = 2000;  ///< steps without overflow after which the scale doubles
};

struct Training {
  int steps = 3;
  int ranks = 1;
  int micro_batches = 1;  ///< of each rank in a step; gradients add up and are not divided by it
  std::variant<pagoda::kernels::AdamConfig, pagoda::kernels::LionConfig, pagoda::kernels::SgdConfig>
      optimizer = pagoda::kernels::AdamConfig{};
  Dtype moments = Dtype::F32;  ///< F32 or BF16
  std::optional<Dtype> accumulation =
      {};                           ///< of gradients over micro-batches; the parameter's if unset
  std::optional<double> clip = {};  ///< largest global norm of the gradient
  std::optional<LossScale> loss_scale = {};
  std::uint64_t data_seed = 1;    ///< of batch_seed()
  std::uint64_t update_seed = 1;  ///< of update_seed()
  /// Whether a rank has this micro-batch: empty for always. One without adds zeros, and no loss.
  /// For plain_loop() only.
  std::function<bool(int rank, int step, int micro)> has_batch = {};
};

struct Trained {
  /// The bits of each fp32 loss before scaling: [step][micro-batch · ranks + rank].
  std::vector<std::vector<std::uint32_t>> losses;
  std::vector<Bits> parameters;  ///< as parameter_bits()
  std::vector<double> norms;     ///< [step]: the global norm, unscaled; only where clipping
  int skipped = 0;               ///< steps that overflowed
  double final_scale = 1;

  float loss(std::size_t step, std::size_t index = 0) const;
  /// The mean over ranks and micro-batches.
  double mean_loss(std::size_t step) const;
};

/// Step::seed of a parameter: `index` is its place in parameter_bits(), frozen ones counted.
std::uint64_t update_seed(std::uint64_t index, std::uint64_t seed) noexcept;

/// Trains on one copy of the parameters: the ranks' batches run one after another.
///
/// Per micro-batch, rank r leaves the gradient g_r in the parameter's type, and
///   s = (float(g₀) + float(g₁) + …) · float(1/N)   in fp32, in rank order;
/// a rank that did not use the parameter adds zero; a micro-batch in which no rank used it adds
/// nothing. Over micro-batches, in the accumulation type A: first a = round_A(s), later
/// a = round_A(float(a) + s). A parameter that no rank used in the whole step is not updated.
///
/// With a loss scale, an infinity or a NaN in any `a` skips the step and halves the scale; it
/// doubles after `growth_window` steps in a row without one. The norm is
/// sqrt(Σ sum_of_squares(a)) ÷ scale, added in double in the order of registration; where clip ÷
/// (norm + 1e-6) is below 1, it multiplies the gradients, together with 1 ÷ scale, as
/// Step::grad_scale. Step::number counts the updates of the parameter, from 1, as
/// torch does.
///
/// The master is fp32: a copy, or the fp32 parameter itself. The elements of a parameter are
/// numbered in the order in which they lie in memory (this matters to stochastic rounding and to
/// the blocks of the norm): for a transposed one that is not the order of its indices.
///
/// `watch`, if any, is called after each step with its number from 0.
Trained plain_loop(::torch::nn::Module& module, const Training& training,
                   const std::function<void(int step)>& watch = {});

/// The same on a new model.
Trained plain_loop(const Options& options, const Training& training);

}  // namespace zoo

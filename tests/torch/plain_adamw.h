// SPDX-License-Identifier: Apache-2.0
// A reference for loops that plain_loop() does not know. Includes torch.
#pragma once

#include <cstring>
#include <functional>
#include <vector>

#include "pagoda/kernels/adam.h"
#include "pagoda/kernels/cast.h"
#include "torch/specimen.h"

namespace zoo {

/// The elements in the order of the tensor's indices.
inline std::vector<float> floats(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().contiguous();
  std::vector<float> out(static_cast<std::size_t>(flat.numel()));
  pagoda::kernels::cast({dtype_of(flat), flat.const_data_ptr()}, out.data(), out.size());
  return out;
}

/// AdamW on plain tensors, with masters that follow what user code writes.
class PlainAdamW {
 public:
  static constexpr double kRate = 1e-2;

  explicit PlainAdamW(::torch::nn::Module& model) {
    for (const auto& [name, tensor] : parameters_once(model)) {
      State state{tensor, tensor.detach().clone(), floats(tensor), {}, {}, {}, false, 0};
      state.momentum.resize(state.master.size());
      state.variance.resize(state.master.size());
      state.sum.resize(state.master.size());
      states_.push_back(std::move(state));
    }
  }

  /// A micro-batch: what each rank's backward leaves in .grad.
  void micro_batch(int ranks, const std::function<void(int rank)>& backward) {
    std::vector<std::vector<float>> total(states_.size());
    for (int rank = 0; rank < ranks; ++rank) {
      backward(rank);
      for (std::size_t s = 0; s < states_.size(); ++s) {
        const at::Tensor grad = states_[s].tensor.grad();
        if (!grad.defined()) continue;
        const std::vector<float> g = floats(grad);
        if (total[s].empty()) {
          total[s] = g;
        } else {
          for (std::size_t i = 0; i < g.size(); ++i) total[s][i] += g[i];
        }
        states_[s].tensor.mutable_grad() = at::Tensor();
      }
    }
    for (std::size_t s = 0; s < states_.size(); ++s) {
      State& state = states_[s];
      if (total[s].empty()) continue;
      for (std::size_t i = 0; i < total[s].size(); ++i) {
        const float mean = total[s][i] * (1.0F / static_cast<float>(ranks));
        state.sum[i] = rounded(state, state.filled ? state.sum[i] + mean : mean);
      }
      state.filled = true;
    }
  }

  void step() {
    const at::NoGradGuard no_grad;
    follow();
    for (State& state : states_) {
      if (!state.filled) continue;
      pagoda::kernels::OptimizerShard shard;
      shard.count = state.master.size();
      shard.grad = pagoda::kernels::ConstElements{Dtype::F32, state.sum.data()};
      shard.master = state.master.data();
      at::Tensor fresh = at::empty(state.before.sizes(), state.before.options());
      if (fresh.scalar_type() != at::kFloat) {
        shard.param = pagoda::kernels::Elements{dtype_of(fresh), fresh.mutable_data_ptr()};
      }
      shard.momentum = pagoda::kernels::Elements{Dtype::F32, state.momentum.data()};
      shard.variance = pagoda::kernels::Elements{Dtype::F32, state.variance.data()};
      pagoda::kernels::adam_step({.lr = kRate, .weight_decay = 0.01}, {++state.updates, 1, 0},
                                 shard);
      if (fresh.scalar_type() == at::kFloat) {
        std::memcpy(fresh.mutable_data_ptr(), state.master.data(), fresh.nbytes());
      }
      state.tensor.copy_(fresh);
      state.before = state.tensor.detach().clone();
      state.filled = false;
    }
  }

  void zero_grad() {
    for (State& state : states_) state.filled = false;
  }
  std::vector<float> sum(std::size_t index) const { return states_[index].sum; }

 private:
  struct State {
    at::Tensor tensor;
    at::Tensor before;
    std::vector<float> master, momentum, variance, sum;
    bool filled;
    std::uint64_t updates;
  };

  static float rounded(const State& state, float value) {
    if (state.tensor.scalar_type() == at::kFloat) return value;
    std::uint16_t bits = 0;
    pagoda::kernels::cast(&value, pagoda::kernels::Elements{dtype_of(state.tensor), &bits}, 1);
    pagoda::kernels::cast(pagoda::kernels::ConstElements{dtype_of(state.tensor), &bits}, &value, 1);
    return value;
  }

  /// Elements that user code has changed set their masters.
  void follow() {
    for (State& state : states_) {
      const std::vector<float> was = floats(state.before);
      const std::vector<float> is = floats(state.tensor);
      for (std::size_t i = 0; i < is.size(); ++i) {
        if (std::memcmp(&was[i], &is[i], sizeof(float)) != 0) state.master[i] = is[i];
      }
      state.before = state.tensor.detach().clone();
    }
  }

  std::vector<State> states_;
};

}  // namespace zoo

// SPDX-License-Identifier: Apache-2.0
#include "torch/plain_loop.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/gradient_norm.h"
#include "pagoda/kernels/rounding_counter.h"
#include "torch/specimen.h"

namespace zoo {
namespace {

namespace kernels = pagoda::kernels;

/// An array of elements in some type.
struct Numbers {
  Dtype type = Dtype::F32;
  std::vector<std::byte> bytes;

  Numbers() = default;
  Numbers(Dtype t, std::size_t count) : type(t), bytes(count * kernels::element_size(t)) {}
  kernels::Elements elements() { return {type, bytes.data()}; }
};

std::vector<float> to_float(kernels::ConstElements from, std::size_t count) {
  std::vector<float> out(count);
  kernels::cast(from, out.data(), count);
  return out;
}

/// A parameter with everything that belongs to it.
struct State {
  at::Tensor parameter;
  std::vector<std::int64_t> memory_order;  // its dimensions, largest stride first
  std::size_t count = 0;
  std::vector<float> master;
  Numbers momentum, variance;
  Numbers gradient;   // accumulated over the micro-batches of a step
  bool used = false;  // in this step
  std::uint64_t updates = 0;
  std::vector<float> s;  // the sum over ranks of this micro-batch
  bool used_now = false;

  /// A tensor of this shape as one contiguous row, in the order of this parameter's memory.
  at::Tensor row(const at::Tensor& tensor) const {
    return tensor.permute(memory_order).contiguous().view({-1});
  }
  std::vector<float> floats(const at::Tensor& tensor) const {
    const at::Tensor flat = row(tensor.detach()).cpu();
    return to_float({dtype_of(flat), flat.const_data_ptr()}, count);
  }
};

std::vector<State> states_of(::torch::nn::Module& module, const Training& training) {
  const bool adam = std::holds_alternative<kernels::AdamConfig>(training.optimizer);
  const auto* sgd = std::get_if<kernels::SgdConfig>(&training.optimizer);
  std::vector<State> out;
  for (auto& [key, parameter] : parameters_once(module)) {
    State state;
    state.parameter = parameter;
    state.memory_order.resize(static_cast<std::size_t>(parameter.dim()));
    std::iota(state.memory_order.begin(), state.memory_order.end(), 0);
    std::stable_sort(state.memory_order.begin(), state.memory_order.end(),
                     [&](auto a, auto b) { return parameter.stride(a) > parameter.stride(b); });
    state.count = static_cast<std::size_t>(parameter.numel());
    state.master = state.floats(parameter);
    if (sgd == nullptr || sgd->momentum != 0) {
      state.momentum = Numbers(training.moments, state.count);
    }
    if (adam) state.variance = Numbers(training.moments, state.count);
    state.gradient = Numbers(training.accumulation.value_or(dtype_of(parameter)), state.count);
    out.push_back(std::move(state));
  }
  return out;
}

/// One rank's backward: adds its gradients to the sums of this micro-batch.
void add_rank(std::vector<State>& states, bool first_rank) {
  for (State& state : states) {
    const at::Tensor gradient = state.parameter.grad();
    std::vector<float> g(state.count, 0.0F);  // an unused parameter adds zero
    if (gradient.defined()) {
      PAGODA_CHECK(gradient.scalar_type() == state.parameter.scalar_type());
      g = state.floats(gradient);
      state.used_now = true;
    }
    if (first_rank) {
      state.s = std::move(g);
    } else {
      for (std::size_t i = 0; i < state.count; ++i) state.s[i] = state.s[i] + g[i];
    }
    state.parameter.mutable_grad() = at::Tensor();
  }
}

/// The end of a micro-batch: the mean over ranks joins the step's gradient.
void accumulate(State& state, int ranks) {
  if (!std::exchange(state.used_now, false)) return;
  const float mean = static_cast<float>(1.0 / ranks);
  for (float& value : state.s) value = value * mean;
  if (state.used) {
    const std::vector<float> before = to_float(state.gradient.elements(), state.count);
    for (std::size_t i = 0; i < state.count; ++i) state.s[i] = before[i] + state.s[i];
  }
  kernels::cast(state.s.data(), state.gradient.elements(), state.count);
  state.used = true;
}

bool all_finite(std::vector<State>& states) {
  return std::all_of(states.begin(), states.end(), [](State& state) {
    return !state.used || kernels::all_finite(state.gradient.elements(), state.count);
  });
}

double global_norm(std::vector<State>& states, double scale) {
  double total = 0;
  for (State& state : states) {
    if (state.used) total += kernels::sum_of_squares(state.gradient.elements(), state.count, 1);
  }
  return std::sqrt(total) / scale;
}

void update(State& state, const Training& training, const kernels::Step& step) {
  Numbers rounded(dtype_of(state.parameter), state.count);
  kernels::OptimizerShard shard;
  shard.count = state.count;
  shard.grad = state.gradient.elements();
  shard.master = state.master.data();
  if (rounded.type != Dtype::F32) shard.param = rounded.elements();
  shard.momentum = state.momentum.elements();
  shard.variance = state.variance.elements();
  if (const auto* adam = std::get_if<kernels::AdamConfig>(&training.optimizer)) {
    kernels::adam_step(*adam, step, shard);
  } else if (const auto* lion = std::get_if<kernels::LionConfig>(&training.optimizer)) {
    kernels::lion_step(*lion, step, shard);
  } else {
    kernels::sgd_step(std::get<kernels::SgdConfig>(training.optimizer), step, shard);
  }
  void* fresh = shard.param ? shard.param.data : state.master.data();
  const at::Tensor row =
      at::from_blob(fresh, {static_cast<std::int64_t>(state.count)}, state.parameter.scalar_type());
  at::Tensor in_memory_order = state.parameter.permute(state.memory_order);
  in_memory_order.copy_(row.view(in_memory_order.sizes()));
}

}  // namespace

float Trained::loss(std::size_t step, std::size_t index) const {
  return std::bit_cast<float>(losses.at(step).at(index));
}

double Trained::mean_loss(std::size_t step) const {
  double sum = 0;
  for (std::size_t i = 0; i < losses.at(step).size(); ++i)
    sum += static_cast<double>(loss(step, i));
  return sum / static_cast<double>(losses[step].size());
}

std::uint64_t update_seed(std::uint64_t index, std::uint64_t seed) noexcept {
  return kernels::mix64(kernels::mix64(seed) ^ index);
}

Trained plain_loop(::torch::nn::Module& module, const Training& training,
                   const std::function<void(int step)>& watch) {
  std::vector<State> states = states_of(module, training);
  Trained out;
  double scale = training.loss_scale ? training.loss_scale->initial : 1;
  int without_overflow = 0;
  for (int step = 0; step < training.steps; ++step) {
    std::vector<std::uint32_t>& losses = out.losses.emplace_back();
    for (State& state : states) state.used = false;
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      for (int rank = 0; rank < training.ranks; ++rank) {
        if (!training.has_batch || training.has_batch(rank, step, micro)) {
          const at::Tensor value = loss(module, batch_seed(training.data_seed, rank, step, micro));
          losses.push_back(std::bit_cast<std::uint32_t>(value.item<float>()));
          (training.loss_scale ? value * scale : value).backward();
        }
        add_rank(states, rank == 0);
      }
      for (State& state : states) accumulate(state, training.ranks);
    }

    const double used_scale = scale;
    bool skip = false;
    if (training.loss_scale) {
      skip = !all_finite(states);
      if (skip) {
        scale /= 2;
        without_overflow = 0;
      } else if (++without_overflow == training.loss_scale->growth_window) {
        scale *= 2;
        without_overflow = 0;
      }
    }
    double grad_scale = 1 / used_scale;
    if (training.clip) {
      out.norms.push_back(global_norm(states, used_scale));
      const double factor = *training.clip / (out.norms.back() + 1e-6);
      if (factor < 1) grad_scale *= factor;
    }
    if (skip) {
      ++out.skipped;
    } else {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < states.size(); ++i) {
        if (!states[i].used) continue;
        update(states[i], training,
               {++states[i].updates, grad_scale, update_seed(i, training.update_seed)});
      }
    }
    if (watch) watch(step);
  }
  out.parameters = parameter_bits(module);
  out.final_scale = scale;
  return out;
}

Trained plain_loop(const Options& options, const Training& training) {
  return plain_loop(*make(options), training);
}

}  // namespace zoo

// SPDX-License-Identifier: Apache-2.0
#include "torch/torch_loop.h"

#include <bit>
#include <cmath>
#include <cstring>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "pagoda/base/error.h"
#include "torch/specimen.h"

namespace zoo {

Trained torch_loop(const Options& options, const Training& training) {
  PAGODA_REQUIRE_EQ(training.ranks, 1);
  const auto& config = std::get<pagoda::kernels::AdamConfig>(training.optimizer);
  const std::shared_ptr<::torch::nn::Module> module = make(options);
  std::vector<at::Tensor> parameters;
  for (const auto& [key, parameter] : parameters_once(*module)) {
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  ::torch::optim::AdamW optimizer(parameters, ::torch::optim::AdamWOptions(config.lr)
                                                  .betas({config.beta1, config.beta2})
                                                  .eps(config.eps)
                                                  .weight_decay(config.weight_decay));
  Trained out;
  for (int step = 0; step < training.steps; ++step) {
    optimizer.zero_grad();
    std::vector<std::uint32_t>& losses = out.losses.emplace_back();
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      const at::Tensor value = loss(*module, batch_seed(training.data_seed, 0, step, micro));
      losses.push_back(std::bit_cast<std::uint32_t>(value.item<float>()));
      value.backward();
    }
    if (training.clip) {
      out.norms.push_back(::torch::nn::utils::clip_grad_norm_(parameters, *training.clip));
    }
    optimizer.step();
  }
  out.parameters = parameter_bits(*module);
  return out;
}

double relative_distance(const std::vector<Bits>& a, const std::vector<Bits>& b) {
  PAGODA_REQUIRE_EQ(a.size(), b.size());
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    PAGODA_REQUIRE_EQ(a[i].name, b[i].name);
    PAGODA_REQUIRE_EQ(a[i].bytes.size(), b[i].bytes.size());
    PAGODA_REQUIRE(a[i].type == Dtype::F32 && b[i].type == Dtype::F32);
    for (std::size_t at = 0; at < a[i].bytes.size(); at += sizeof(float)) {
      float x, y;
      std::memcpy(&x, a[i].bytes.data() + at, sizeof(float));
      std::memcpy(&y, b[i].bytes.data() + at, sizeof(float));
      difference += std::pow(static_cast<double>(x) - static_cast<double>(y), 2);
      size += std::pow(static_cast<double>(y), 2);
    }
  }
  return std::sqrt(difference / size);
}

}  // namespace zoo

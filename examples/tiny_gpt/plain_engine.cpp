// SPDX-License-Identifier: Apache-2.0
#include "plain_engine.h"

namespace tiny_gpt::plain {

Engine::Engine(Config, World) {}

void Engine::attach(torch::nn::Module& model, const AdamW& optimizer) {
  optimizer_ = std::make_unique<torch::optim::AdamW>(
      model.parameters(),
      torch::optim::AdamWOptions(optimizer.lr).weight_decay(optimizer.weight_decay));
  // Parameter, gradient and two moments.
  for (const at::Tensor& parameter : model.parameters())
    stats_.host_bytes += 4 * parameter.nbytes();
}

void Engine::backward(const at::Tensor& loss) {
  loss.backward();
}

void Engine::step() {
  optimizer_->step();
  optimizer_->zero_grad();
}

}  // namespace tiny_gpt::plain

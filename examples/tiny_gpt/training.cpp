// SPDX-License-Identifier: Apache-2.0
#include "training.h"

#include <algorithm>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <torch/utils.h>

#include "pagoda/base/clock.h"

namespace tiny_gpt {

/// Where an operator fails because its page could not come, the engine has the cause.
template <class Fn>
auto Training::plainly(const Fn& fn) {
  try {
    return fn();
  } catch (const c10::Error&) {
    engine_.finish();  // throws it
    throw;
  }
}

Training::Training(const pagoda::Config& config, const Flags& flags, const Text& text)
    : flags_(flags), text_(text), engine_(config), model_(nullptr) {
  // Half of the cores: the engine has work for the others, and torch's threads spin while they
  // wait.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(flags.threads > 0 ? flags.threads : std::max(1, cores / 2));
  torch::manual_seed(flags.seed);
  model_ = plainly(
      [&] { return engine_.build([&] { return Gpt(GptOptions{.sequence = flags.sequence}); }); });
  engine_.attach(*model_, pagoda::AdamW{.lr = flags.lr});
  device_ = model_->parameters().front().device();
}

float Training::step() {
  const Batch batch =
      text_.batch(static_cast<std::size_t>(flags_.batch), static_cast<std::size_t>(flags_.sequence),
                  flags_.seed + static_cast<std::uint64_t>(steps_));
  // The loop of plain torch, but for the engine's two calls.
  const at::Tensor loss =
      plainly([&] { return model_->loss(tensor(batch.inputs), tensor(batch.targets)); });
  engine_.backward(loss);
  const pagoda::Stopwatch watch;
  engine_.step();
  seconds_in_step_ += watch.seconds();
  ++steps_;
  return loss.item<float>();
}

std::string Training::write(std::int64_t bytes) {
  return plainly([&] { return model_->generate("\n", bytes, 0.8, flags_.seed); });
}

at::Tensor Training::tensor(const std::vector<std::int64_t>& values) const {
  return at::from_blob(const_cast<std::int64_t*>(values.data()), {flags_.batch, flags_.sequence},
                       at::kLong)
      .to(device_, at::kLong, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace tiny_gpt

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flags.h"
#include "gpt.h"
#include "pagoda/torch/engine.h"
#include "text.h"

namespace tiny_gpt {

/// A model and the engine that trains it. One thread.
class Training {
 public:
  /// Builds the model inside the engine: its parameters are pages from the first one on.
  Training(const pagoda::Config& config, const Flags& flags, const Text& text);

  /// The next step, on the batch of its number; returns the loss.
  float step();
  /// What the model writes, from an empty line on. Its parameters come and go as in training.
  std::string write(std::int64_t bytes);

  std::int64_t steps() const noexcept { return steps_; }
  std::int64_t parameters() const { return model_->parameter_count(); }
  /// Time in engine.step(), where nothing is computed.
  double seconds_in_step() const noexcept { return seconds_in_step_; }
  pagoda::Engine& engine() noexcept { return engine_; }

 private:
  template <class Fn>
  auto plainly(const Fn& fn);
  at::Tensor tensor(const std::vector<std::int64_t>& values) const;

  const Flags& flags_;
  const Text& text_;
  pagoda::Engine engine_;
  Gpt model_;
  at::Device device_{at::kCPU};
  std::int64_t steps_ = 0;
  double seconds_in_step_ = 0;
};

}  // namespace tiny_gpt

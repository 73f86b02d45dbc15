// SPDX-License-Identifier: Apache-2.0
// Stands where pagoda::Engine will: the same calls, with the model held in memory as torch does.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include "pagoda/base/bytes.h"

namespace tiny_gpt::plain {

struct Config {
  std::string directory = ".";
  std::optional<pagoda::Bytes> device_budget = {};
  std::optional<pagoda::Bytes> host_budget = {};
};

struct AdamW {
  double lr = 3e-4;
  double weight_decay = 0.01;
};

/// What a program shows of an engine: nothing is paged here, so nothing waits.
struct Stats {
  double stall_seconds = 0;
  pagoda::Bytes device_bytes = 0, host_bytes = 0, nvme_bytes = 0;
};

struct World {
  int rank = 0, size = 1;
};
inline World world_from_env() {
  return {};
}

/// One thread.
class Engine {
 public:
  Engine(Config config, World world);
  template <class Make>
  auto build(Make&& make) {
    return make();
  }
  void attach(torch::nn::Module& model, const AdamW& optimizer);
  void backward(const at::Tensor& loss);
  void step();
  void finish() {}
  void release(torch::nn::Module&) {}
  Stats stats() const { return stats_; }

 private:
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  Stats stats_;
};

}  // namespace tiny_gpt::plain

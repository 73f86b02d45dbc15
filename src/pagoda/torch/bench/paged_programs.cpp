// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/bench/paged_programs.h"

#include <algorithm>
#include <ctime>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include "pagoda/torch/engine.h"

namespace pagoda::torch::bench {
namespace {

/// Time that this thread has computed: what else the machine does is not in it.
double thread_nanoseconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

double middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Nanoseconds an operator, with the observer and (`run_unseen`) without, in turns.
template <class Operators, class Unseen>
std::pair<double, double> in_turns(std::size_t rounds, std::size_t operators, const Operators& run,
                                   const Unseen& run_unseen) {
  std::vector<double> with;
  std::vector<double> without;
  const auto time = [&](const auto& what) {
    const double before = thread_nanoseconds();
    what();
    return (thread_nanoseconds() - before) / static_cast<double>(operators);
  };
  for (std::size_t round = 0; round < rounds; ++round) {
    with.push_back(time(run));
    const at::DisableRecordFunctionGuard unseen;
    without.push_back(time(run_unseen));
  }
  return {middle(with), middle(without)};
}

struct Weights : ::torch::nn::Module {
  explicit Weights(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      all.push_back(register_parameter("w" + std::to_string(i), at::ones({16}), false));
    }
  }
  std::vector<at::Tensor> all;
};

/// Attention's place is taken by a product, for only the order of the parameters matters.
struct GptLike : ::torch::nn::Module {
  GptLike(std::size_t layers, std::size_t width) {
    const auto w = static_cast<std::int64_t>(width);
    const auto add = [&](const std::string& name, at::IntArrayRef sizes) {
      weights.push_back(register_parameter(name, at::randn(sizes).mul_(0.02)));
    };
    for (std::size_t i = 0; i < layers; ++i) {
      const std::string at = "block" + std::to_string(i) + "_";
      add(at + "norm1", {w});
      add(at + "qkv", {3 * w, w});
      add(at + "out", {w, w});
      add(at + "norm2", {w});
      add(at + "up", {4 * w, w});
      add(at + "down", {w, 4 * w});
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < weights.size(); i += 6) {
      const auto parts = at::linear(x * weights[i], weights[i + 1]).chunk(3, -1);
      x = x + at::linear(parts[0] * parts[1].sigmoid() + parts[2], weights[i + 2]);
      x = x + at::linear(at::gelu(at::linear(x * weights[i + 3], weights[i + 4])), weights[i + 5]);
    }
    return x.square().mean();
  }
  std::vector<at::Tensor> weights;
};

}  // namespace

ObserverCost observer_cost(std::size_t pages, std::size_t rounds) {
  const at::NoGradGuard no_grad;
  Config config;
  config.device = "cpu";
  config.device_budget = 64_MiB;
  config.parameters = Placement::Host;
  config.staging = 1_MiB;
  config.update_chunk = 1_MiB;
  Engine engine(config);
  Weights weights(pages);
  engine.attach(weights, AdamW{});
  const at::Tensor plain = at::ones({16});
  at::Tensor out = at::empty({16});
  const auto negate = [&](const std::vector<at::Tensor>& all) {
    for (const at::Tensor& weight : all) at::neg_out(out, weight);
  };
  const auto touch_all = [&] { negate(weights.all); };
  // Pages that nobody announces throw: the operator alone has copies of them.
  std::vector<at::Tensor> copies;
  for (const at::Tensor& weight : weights.all) copies.push_back(weight.clone());
  for (int i = 0; i < 3; ++i) touch_all();  // all are resident, and their order is known

  ObserverCost cost;
  const auto plain_only = [&] {
    for (std::size_t i = 0; i < pages; ++i) at::neg_out(out, plain);
  };
  const auto [with, without] = in_turns(rounds, pages, plain_only, plain_only);
  cost.untouched = std::max(1.0, with - without);
  cost.operator_alone = without;
  const auto [touching, alone] = in_turns(rounds, pages, touch_all, [&] { negate(copies); });
  cost.touching = std::max(1.0, touching - alone);
  return cost;
}

std::vector<engine::Stats> train_gpt_like(const Config& config, std::size_t layers,
                                          std::size_t width, std::size_t steps) {
  Engine engine(config);
  const auto model = engine.build([&] { return std::make_shared<GptLike>(layers, width); });
  engine.attach(*model, AdamW{});
  const at::Tensor batch = at::randn({64, static_cast<std::int64_t>(width)});
  std::vector<engine::Stats> out;
  for (std::size_t step = 0; step < steps; ++step) {
    engine.backward(model->forward(batch));
    engine.step();
    out.push_back(engine.stats());
  }
  engine.finish();
  return out;
}

}  // namespace pagoda::torch::bench

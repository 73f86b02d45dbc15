// SPDX-License-Identifier: Apache-2.0
#include "torch/fuzz.h"

#include <random>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/engine.h"
#include "torch/parity_case.h"
#include "torch/plain_adamw.h"

namespace zoo {
namespace {

using Random = std::mt19937_64;
using namespace pagoda::literals;

constexpr std::int64_t kSide = 40;
constexpr std::size_t kOperators = 30;

/// Square matrices and rows, some of them transposed in memory.
struct Drawn : ::torch::nn::Module {
  Drawn(std::uint64_t seed, at::ScalarType type) {
    Random random(seed);
    const std::size_t count = 3 + random() % 6;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    for (std::size_t i = 0; i < count; ++i) {
      const bool row = random() % 4 == 0;
      at::Tensor value =
          (row ? at::randn({kSide}, generator) : at::randn({kSide, kSide}, generator));
      value = (value * 0.1).to(type);
      if (!row && random() % 4 == 0) value = value.t();
      parameters_.push_back(register_parameter(fmt::format("p{}", i), value));
    }
  }

  const at::Tensor& any(Random& random) const { return parameters_[random() % parameters_.size()]; }
  /// A matrix made of a parameter: itself, or a view.
  at::Tensor matrix(Random& random) const {
    const at::Tensor& parameter = any(random);
    if (parameter.dim() == 1) return parameter.expand({kSide, kSide});
    return random() % 3 == 0 ? parameter.t() : parameter;
  }

  std::vector<at::Tensor> parameters_;
};

/// The loss of one pass; the same operators for the same generator.
at::Tensor run(const Drawn& model, Random& random) {
  std::vector<at::Tensor> values = {model.matrix(random) * 1};
  const auto value = [&] { return values[random() % values.size()]; };
  for (std::size_t i = 0; i < kOperators; ++i) {
    at::Tensor next;
    switch (random() % 9) {
      case 0:
        next = at::mm(value(), model.matrix(random));
        break;
      case 1:
        next = value() + model.matrix(random);
        break;
      case 2:
        next = value() * model.any(random);
        break;
      case 3:
        next = value().t();
        break;
      case 4: {
        const auto cut = static_cast<std::int64_t>(1 + random() % (kSide - 1));
        const at::Tensor top = value();
        next = at::cat({top.narrow(0, 0, cut), model.matrix(random).narrow(0, cut, kSide - cut)});
        break;
      }
      case 5:
        next = at::tanh(value());
        break;
      case 6: {
        const at::Tensor before = value();
        next = before + model.matrix(random).sum(0);
        break;
      }
      case 7:
        next = at::addmm(value(), model.matrix(random), model.matrix(random));
        break;
      default:
        next = at::stack({value(), model.matrix(random)}).mean(0);
        break;
    }
    values.push_back(at::tanh(next));
  }
  return values.back().to(at::kFloat).pow(2).mean() + value().to(at::kFloat).mean();
}

/// What user code does to parameters between steps.
void write(const Drawn& model, Random& random) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = random() % 4; i > 0; --i) {
    const at::Tensor& parameter = model.any(random);
    switch (random() % 3) {
      case 0:
        parameter.mul_(0.75);
        break;
      case 1:
        parameter.narrow(0, 3, 10).add_(0.0625);
        break;
      default:
        parameter.copy_(model.any(random).sum() * 1e-3 + parameter);
        break;
    }
  }
}

pagoda::Config config_of(Random& random, at::ScalarType type) {
  pagoda::Config config;
  set_small_pieces(config);
  config.device = random() % 2 == 0 ? "cpu" : "emulated";
  config.check_order = random() % 2 == 0;
  config.prefetch = random() % 2 == 0;
  const pagoda::Bytes page =
      pagoda::align_up(kSide * kSide * c10::elementSize(type), pagoda::Bytes{512});
  config.gradient_staging = page * (1 + random() % 2);
  // The widest operator takes three pages.
  config.device_budget = config.gradient_staging + page * (3 + random() % 6);
  const auto place = [&] {
    constexpr pagoda::Placement kAll[] = {pagoda::Placement::Auto, pagoda::Placement::Host,
                                          pagoda::Placement::Nvme};
    return kAll[random() % 3];
  };
  config.parameters = place();
  config.gradients = place();
  config.optimizer = place();
  config.nvme = {scratch_directory()};
  config.nvme_budget = 16_MiB;
  if (type == at::kBFloat16 && random() % 2 == 0) config.master = pagoda::Master::Split;
  return config;
}

}  // namespace

std::string fuzz(std::uint64_t seed) {
  use_one_torch_thread();
  constexpr int kSteps = 3;
  Random choice(seed);
  const at::ScalarType type = choice() % 2 == 0 ? at::kFloat : at::kBFloat16;
  const pagoda::Config config = config_of(choice, type);
  std::vector<float> losses;
  const Drawn plain(seed, type);
  PlainAdamW reference(const_cast<Drawn&>(plain));
  for (int step = 0; step < kSteps; ++step) {
    Random random(seed + static_cast<std::uint64_t>(step) * 1000);
    write(plain, random);
    reference.micro_batch(1, [&](int) {
      const at::Tensor loss = run(plain, random);
      losses.push_back(loss.item<float>());
      loss.backward();
    });
    reference.step();
  }
  try {
    pagoda::Engine engine(config);
    const auto model = engine.build([&] { return std::make_shared<Drawn>(seed, type); });
    engine.attach(*model, pagoda::AdamW{.lr = PlainAdamW::kRate});
    for (int step = 0; step < kSteps; ++step) {
      Random random(seed + static_cast<std::uint64_t>(step) * 1000);
      write(*model, random);
      const at::Tensor loss = run(*model, random);
      const auto value = loss.item<float>();
      if (value != losses[static_cast<std::size_t>(step)] && value == value) {
        return fmt::format("loss {} instead of {} in step {} ({})", value,
                           losses[static_cast<std::size_t>(step)], step, config.to_json());
      }
      if (step % 2 == 0) {
        engine.backward(loss);
      } else {
        loss.backward();
      }
      engine.step();
    }
    const std::vector<Bits> expected = parameter_bits(plain);
    const std::vector<Bits> got = parameter_bits(*model);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (got[i] == expected[i]) continue;
      return fmt::format("parameter '{}' of {} differs ({})", expected[i].name, expected.size(),
                         config.to_json());
    }
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return fmt::format("threw: {} ({})", text.substr(0, text.find("\nException raised")),
                       config.to_json());
  }
  return {};
}

}  // namespace zoo

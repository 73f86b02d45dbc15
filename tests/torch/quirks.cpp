// SPDX-License-Identifier: Apache-2.0
#include "torch/quirks.h"

#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/torch/engine.h"
#include "torch/plain_adamw.h"
#include "torch/specimen.h"

namespace zoo {
namespace {

namespace nn = ::torch::nn;
using pagoda::Engine;
using namespace pagoda::literals;

constexpr std::int64_t kIn = 96;
constexpr std::int64_t kWide = 200;

/// Torch has one generator, and ranks are threads here.
std::mutex& seeding() {
  static std::mutex mutex;
  return mutex;
}

/// Two layers with a batch norm in between: large enough to be cut over ranks.
struct Toy : nn::Module {
  explicit Toy(at::ScalarType type) {
    const std::lock_guard lock(seeding());
    ::torch::manual_seed(7);
    first = register_module("first", nn::Linear(kIn, kWide));
    norm = register_module("norm", nn::BatchNorm1d(kWide));
    second = register_module("second", nn::Linear(kWide, kIn));
    to(type);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::gelu(norm(first(x)))); }
  at::Tensor loss(std::uint64_t seed) {
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
    const at::Tensor x = at::randn({8, kIn}, random).to(second->weight.scalar_type());
    return (forward(x) - x.roll(1, 1)).to(at::kFloat).pow(2).mean();
  }
  nn::Linear first{nullptr}, second{nullptr};
  nn::BatchNorm1d norm{nullptr};
};

std::shared_ptr<Toy> toy(const Setting& setting) {
  return std::make_shared<Toy>(scalar_type(setting.dtype));
}

const pagoda::AdamW kRule{.lr = PlainAdamW::kRate};

std::string difference_of(const std::vector<Bits>& expected, const std::vector<Bits>& got) {
  if (expected.size() != got.size()) return "other parameters";
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].bytes != got[i].bytes) {
      return fmt::format("parameter '{}' differs", expected[i].name);
    }
  }
  return {};
}

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const pagoda::Error*>(&error);
  const std::string text = ours != nullptr ? ours->message() : error.what();
  return text.substr(0, text.find("\nException raised"));
}

using Body =
    std::function<std::string(Engine& engine, const std::shared_ptr<Toy>& model, int rank)>;

/// Runs `body` on every rank with a toy that is built but not attached; the first complaint.
std::string on_engine(const Setting& setting, const Body& body) {
  const auto worlds = pagoda::comm::make_thread_worlds(setting.ranks);
  std::vector<std::string> wrong(worlds.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < worlds.size(); ++r) {
      threads.emplace_back([&, r] {
        use_one_torch_thread();
        try {
          Engine engine(setting.config, worlds[r]);
          const auto model = engine.build([&] { return toy(setting); });
          wrong[r] = body(engine, model, static_cast<int>(r));
        } catch (const std::exception& error) {
          wrong[r] = "threw: " + message_of(error);
        }
      });
    }
  }
  for (const std::string& each : wrong) {
    if (!each.empty()) return each;
  }
  return {};
}

std::uint64_t seed_of(int rank, int step) {
  return batch_seed(3, rank, step, 0);
}

/// A habit that is a loop of steps: `before_step` does something to the model, `backward` leaves
/// gradients of one micro-batch.
struct Habit {
  std::function<void(Toy&, int step)> before_step = [](Toy&, int) {};
  std::function<void(Toy&, int step, int rank, const std::function<void(const at::Tensor&)>&)>
      micro_batch = [](Toy& model, int step, int rank, const auto& backward) {
        backward(model.loss(seed_of(rank, step)));
      };
  int steps = 4;
};

std::string compare(const Setting& setting, const Habit& habit) {
  use_one_torch_thread();
  const auto plain = toy(setting);
  PlainAdamW reference(*plain);
  for (int step = 0; step < habit.steps; ++step) {
    habit.before_step(*plain, step);
    // A micro-batch may call backward more than once: each call is one of the reference's.
    std::vector<std::vector<at::Tensor>> calls;
    int count = 0;
    habit.micro_batch(*plain, step, 0, [&](const at::Tensor&) { ++count; });
    for (int call = 0; call < count; ++call) {
      reference.micro_batch(setting.ranks, [&](int rank) {
        int now = 0;
        habit.micro_batch(*plain, step, rank, [&](const at::Tensor& loss) {
          if (now++ == call) loss.backward({}, /*retain_graph=*/true);
        });
      });
    }
    reference.step();
  }
  const std::vector<Bits> expected = parameter_bits(*plain);
  return on_engine(setting, [&](Engine& engine, const std::shared_ptr<Toy>& model, int rank) {
    engine.attach(*model, kRule);
    for (int step = 0; step < habit.steps; ++step) {
      habit.before_step(*model, step);
      habit.micro_batch(*model, step, rank,
                        [&](const at::Tensor& loss) { loss.backward({}, /*retain_graph=*/true); });
      engine.step();
    }
    engine.finish();
    return difference_of(expected, parameter_bits(*model));
  });
}

std::string plain_training(const Setting& setting) {
  return compare(setting, {});
}

std::string writes_between_steps(const Setting& setting) {
  Habit habit;
  habit.before_step = [](Toy& model, int step) {
    const at::NoGradGuard no_grad;
    model.first->weight.mul_(0.99).add_(0.001);
    if (step == 1) model.second->weight.narrow(0, 0, 10).zero_();  // a part is made anew
    if (step == 2) model.second->bias.fill_(0.5);
    if (step == 3) model.first->weight.copy_(model.first->weight);  // nothing changes
  };
  return compare(setting, habit);
}

std::string double_backward(const Setting& setting) {
  Habit habit;
  habit.micro_batch = [](Toy& model, int step, int rank, const auto& backward) {
    const at::Tensor loss = model.loss(seed_of(rank, step));
    const auto grads = ::torch::autograd::grad({loss}, {model.first->weight, model.second->weight},
                                               {}, true, /*create_graph=*/true);
    backward(loss +
             0.1 * (grads[0].to(at::kFloat).pow(2).sum() + grads[1].to(at::kFloat).pow(2).sum()));
  };
  return compare(setting, habit);
}

std::string two_backwards_of_one_graph(const Setting& setting) {
  Habit habit;
  habit.micro_batch = [](Toy& model, int step, int rank, const auto& backward) {
    const at::Tensor loss = model.loss(seed_of(rank, step));
    backward(loss);
    backward(loss * 0.5);
  };
  return compare(setting, habit);
}

std::string evaluation_between_steps(const Setting& setting) {
  Habit habit;
  habit.before_step = [](Toy& model, int step) {
    const at::NoGradGuard no_grad;
    model.eval();
    at::Tensor x = at::ones({1, kIn}, model.second->weight.options());
    for (int token = 0; token < 3 + step; ++token) x = model.forward(x).tanh();  // generation
    model.train();
  };
  return compare(setting, habit);
}

std::string parameters_reached_by_views(const Setting& setting) {
  Habit habit;
  habit.micro_batch = [](Toy& model, int step, int rank, const auto& backward) {
    const at::Tensor rows = model.first->weight.narrow(0, 10, 20).t();
    const at::Tensor columns = model.second->weight.select(1, 3);
    backward(model.loss(seed_of(rank, step)) + rows.to(at::kFloat).pow(2).mean() +
             columns.to(at::kFloat).sum() * 0.01);
  };
  return compare(setting, habit);
}

/// Gradients, their norm, and dropping them.
std::string gradients_are_seen(const Setting& setting) {
  use_one_torch_thread();
  const auto plain = toy(setting);
  PlainAdamW reference(*plain);
  const auto backward = [&](int step) {
    reference.micro_batch(setting.ranks,
                          [&](int rank) { plain->loss(seed_of(rank, step)).backward(); });
  };
  backward(0);
  const std::vector<float> expected = reference.sum(0);
  double squares = 0;
  for (std::size_t i = 0; i < parameters_once(*plain).size(); ++i) {
    for (const float g : reference.sum(i))
      squares += static_cast<double>(g) * static_cast<double>(g);
  }
  reference.zero_grad();
  backward(1);
  reference.step();
  const std::vector<Bits> parameters = parameter_bits(*plain);
  return on_engine(setting, [&](Engine& engine, const std::shared_ptr<Toy>& model, int rank) {
    engine.attach(*model, kRule);
    engine.backward(model->loss(seed_of(rank, 0)));
    const at::Tensor grad = engine.grad(model->first->weight);
    if (grad.sizes() != model->first->weight.sizes()) return std::string("grad() has other sizes");
    if (floats(grad) != expected) return std::string("grad() has other values");
    const double norm = engine.grad_norm();
    if (std::abs(norm - std::sqrt(squares)) > 1e-6 * norm) {
      return fmt::format("grad_norm() is {} instead of {}", norm, std::sqrt(squares));
    }
    engine.zero_grad();
    engine.backward(model->loss(seed_of(rank, 1)));
    engine.step();
    return difference_of(parameters, parameter_bits(*model));
  });
}

/// No backward at all: what each rank puts into p.grad is its micro-batch.
std::string gradients_are_set(const Setting& setting) {
  use_one_torch_thread();
  const auto set = [](Toy& model, int rank, int step) {
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed_of(rank, step));
    for (const at::Tensor& parameter : {model.first->weight, model.second->bias}) {
      parameter.mutable_grad() = at::randn(parameter.sizes(), random).to(parameter.scalar_type());
    }
  };
  const auto plain = toy(setting);
  PlainAdamW reference(*plain);
  for (int step = 0; step < 3; ++step) {
    reference.micro_batch(setting.ranks, [&](int rank) { set(*plain, rank, step); });
    reference.step();
  }
  const std::vector<Bits> expected = parameter_bits(*plain);
  return on_engine(setting, [&](Engine& engine, const std::shared_ptr<Toy>& model, int rank) {
    engine.attach(*model, kRule);
    for (int step = 0; step < 3; ++step) {
      set(*model, rank, step);
      engine.step();
    }
    return difference_of(expected, parameter_bits(*model));
  });
}

/// Modules made outside of build(), types changed after it, data exchanged: all before attach().
std::string changed_before_attach(const Setting& setting) {
  use_one_torch_thread();
  const auto change = [&](Toy& model) {
    model.to(at::kFloat);
    model.first->weight.set_data(model.first->weight.detach() * 2);
    model.to(scalar_type(setting.dtype));
    const at::NoGradGuard no_grad;
    const std::lock_guard lock(seeding());
    nn::Linear late(kIn, 3);
    late->weight.fill_(0.1);
    late->bias.fill_(0.2);
    late->to(scalar_type(setting.dtype));
    model.register_module("late", late);
  };
  const auto loss = [](Toy& model, std::uint64_t seed) {
    auto* late = model.named_children()["late"]->as<nn::Linear>();
    const at::Tensor ones = at::ones({2, kIn}, late->weight.options().requires_grad(false));
    return model.loss(seed) + late->forward(ones).to(at::kFloat).pow(2).mean();
  };
  const auto plain = toy(setting);
  change(*plain);
  PlainAdamW reference(*plain);
  for (int step = 0; step < 3; ++step) {
    reference.micro_batch(setting.ranks,
                          [&](int rank) { loss(*plain, seed_of(rank, step)).backward(); });
    reference.step();
  }
  const std::vector<Bits> expected = parameter_bits(*plain);
  return on_engine(setting, [&](Engine& engine, const std::shared_ptr<Toy>& model, int rank) {
    change(*model);
    engine.attach(*model, kRule);
    for (int step = 0; step < 3; ++step) {
      engine.backward(loss(*model, seed_of(rank, step)));
      engine.step();
    }
    return difference_of(expected, parameter_bits(*model));
  });
}

std::string buffers_are_left_alone(const Setting& setting) {
  use_one_torch_thread();
  const auto plain = toy(setting);
  (void)plain->loss(seed_of(0, 0));
  const std::vector<float> expected = floats(plain->norm->running_mean);
  return on_engine(setting, [&](Engine& engine, const std::shared_ptr<Toy>& model, int /*rank*/) {
    engine.attach(*model, kRule);
    engine.backward(model->loss(seed_of(0, 0)));
    engine.step();
    const at::DisableRecordFunctionGuard unseen;  // a plain tensor's pointer needs no announcement
    return floats(model->norm->running_mean) == expected ? std::string() : "running_mean differs";
  });
}

pagoda::Config small_config() {
  pagoda::Config config;
  config.device = "cpu";
  config.device_budget = 400_KiB;
  config.gradient_staging = 100_KiB;
  config.parameters = pagoda::Placement::Host;
  config.staging = 32_KiB;
  config.update_chunk = 32_KiB;
  config.bucket = 64_KiB;
  return config;
}

template <class Work>
std::string said(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "nothing";
}

/// A module with parameters of one's own.
struct Loose : nn::Module {};

std::string refusal_of_parameters(const std::vector<at::Tensor>& tensors, bool requires_grad) {
  return said([&] {
    Engine engine(small_config());
    Loose model;
    int number = 0;
    for (const at::Tensor& tensor : tensors) {
      model.register_parameter(fmt::format("p{}", number++), tensor, requires_grad);
    }
    engine.attach(model, kRule);
  });
}

}  // namespace

std::vector<Quirk> quirks() {
  return {
      {"plain training", plain_training},
      {"in-place writes between steps", writes_between_steps},
      {"double backward", double_backward},
      {"two backwards of one graph", two_backwards_of_one_graph},
      {"evaluation between steps", evaluation_between_steps},
      {"parameters reached by views", parameters_reached_by_views},
      {"gradients are seen", gradients_are_seen},
      {"gradients are set", gradients_are_set},
      {"changed before attach", changed_before_attach},
      {"buffers are left alone", buffers_are_left_alone},
  };
}

std::string refusal_of_double() {
  return refusal_of_parameters({at::ones({4}, at::kDouble)}, true);
}
std::string refusal_of_complex() {
  return refusal_of_parameters({at::ones({4}, at::kComplexFloat)}, true);
}
std::string refusal_of_integers() {
  return refusal_of_parameters({at::ones({4}, at::kLong)}, false);
}

std::string refusal_of_meta() {
  return refusal_of_parameters(
      {at::ones({4}), at::empty({4}, at::TensorOptions().device(at::kMeta))}, true);
}
std::string refusal_of_constants() {
  std::string out;
  for (const pagoda::Optimizer& rule :
       {pagoda::Optimizer(pagoda::AdamW{.lr = std::nan("")}),
        pagoda::Optimizer(pagoda::Adam{.beta2 = 1}), pagoda::Optimizer(pagoda::Sgd{.momentum = -1}),
        pagoda::Optimizer(pagoda::Lion{.weight_decay = -1})}) {
    out += said([&] {
      Engine engine(small_config());
      engine.attach(*nn::Linear(4, 4), rule);
    });
  }
  return out + said([] {
           Engine engine(small_config());
           nn::Linear model(4, 4);
           engine.attach(*model, kRule);
           engine.set_lr(-1);
         });
}

std::string refusal_of_overlap() {
  const at::Tensor storage = at::ones({10});
  return refusal_of_parameters({storage.narrow(0, 0, 6).detach(), storage.narrow(0, 4, 6).detach()},
                               true);
}

std::string refusal_of_sparse_gradients() {
  return said([] {
    Engine engine(small_config());
    nn::Embedding model(nn::EmbeddingOptions(8, 4).sparse(true));
    engine.attach(*model, kRule);
  });
}

std::string refusal_of_two_models() {
  return said([] {
    Engine engine(small_config());
    nn::Linear one(3, 3), two(3, 3);
    engine.attach(*one, kRule);
    engine.attach(*two, kRule);
  });
}

std::string refusal_of_other_values(int rank) {
  const auto worlds = pagoda::comm::make_thread_worlds(2);
  std::vector<std::string> out(2);
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        out[r] = said([&] {
          pagoda::Config config = small_config();
          config.initial = pagoda::Initial::Check;
          Engine engine(config, worlds[r]);
          nn::Linear model(30, 30);
          const at::NoGradGuard no_grad;
          model->weight.fill_(static_cast<double>(r));
          model->bias.fill_(1);
          engine.attach(*model, kRule);
        });
      });
    }
  }
  return out[static_cast<std::size_t>(rank)];
}

std::string refusal_of(const pagoda::Config& config) {
  return said([&] {
    Engine engine(config);
    const auto model = engine.build([] { return std::make_shared<Toy>(at::kFloat); });
    engine.attach(*model, kRule);
  });
}

TooLarge too_large_operator() {
  TooLarge out;
  pagoda::Config config = small_config();
  config.device_budget = 200_KiB;
  config.gradient_staging = 80_KiB;
  Engine engine(config);
  const auto model = engine.build([] { return std::make_shared<Toy>(at::kFloat); });
  engine.attach(*model, kRule);
  out.by_operator =
      said([&] { (void)at::mm(model->first->weight, model->second->weight); });  // 75 KiB each
  out.by_engine = said([&] { engine.step(); });
  return out;
}

std::string raw_pointer_of_absent() {
  Engine engine(small_config());
  const auto model = engine.build([] { return std::make_shared<Toy>(at::kFloat); });
  engine.attach(*model, kRule);
  engine.backward(model->loss(1));
  engine.step();
  return said([&] { (void)model->first->weight.const_data_ptr(); });
}

std::string raw_pointer_after_engine() {
  std::shared_ptr<Toy> model;
  {
    Engine engine(small_config());
    model = engine.build([] { return std::make_shared<Toy>(at::kFloat); });
    engine.attach(*model, kRule);
    engine.backward(model->loss(1));
    engine.step();
  }
  const std::string pointer = said([&] { (void)model->first->weight.const_data_ptr(); });
  const std::string by_operator = said([&] { (void)model->first->weight.sum(); });
  return pointer == by_operator ? pointer : fmt::format("'{}' and '{}'", pointer, by_operator);
}

std::string pinned_is_readable() {
  use_one_torch_thread();
  const Setting setting{small_config(), 1, Dtype::F32};
  const auto plain = toy(setting);
  return on_engine(setting, [&](Engine& engine, const std::shared_ptr<Toy>& model, int) {
    engine.attach(*model, kRule);
    const auto pin = engine.pin(model->first->weight);
    const std::size_t bytes = model->first->weight.nbytes();
    const void* before = model->first->weight.const_data_ptr();
    if (std::memcmp(before, plain->first->weight.const_data_ptr(), bytes) != 0) {
      return std::string("other bytes");
    }
    engine.backward(model->loss(1));
    engine.step();
    const at::Tensor copy = model->first->weight.detach().clone();  // sees the update
    const void* after = model->first->weight.const_data_ptr();
    if (after != before) return std::string("the pinned page moved");
    if (std::memcmp(after, copy.const_data_ptr(), bytes) != 0) return std::string("it is stale");
    return std::memcmp(copy.const_data_ptr(), plain->first->weight.const_data_ptr(), bytes) == 0
               ? std::string("no update was made")
               : std::string();
  });
}

std::string exchanged_storage_after_attach(int ranks) {
  use_one_torch_thread();
  const Setting setting{small_config(), ranks, Dtype::BF16};
  Habit habit;
  habit.before_step = [](Toy& model, int step) {
    if (step == 1) model.first->weight.set_data(model.first->weight.detach() * 2);
    if (step == 2) model.first->bias.set_data(model.first->bias.detach() + 1);
  };
  return compare(setting, habit);
}

std::string exchanged_storage_of_another_type() {
  return said([] {
    Engine engine(small_config());
    const auto model = engine.build([] { return std::make_shared<Toy>(at::kFloat); });
    engine.attach(*model, kRule);
    engine.backward(model->loss(1));
    engine.step();
    model->to(at::kBFloat16);
    engine.backward(model->loss(2));
    engine.step();
  });
}

std::string late_parameter_stays_plain() {
  const Setting setting{small_config(), 1, Dtype::F32};
  return on_engine(setting, [&](Engine& engine, const std::shared_ptr<Toy>& model, int) {
    engine.attach(*model, kRule);
    nn::Linear late(kIn, 2);
    model->register_module("late", late);
    const at::Tensor before = late->weight.detach().clone();
    engine.backward(model->loss(1) + late(at::ones({1, kIn})).sum());
    engine.step();
    if (!late->weight.grad().defined()) return std::string("its gradient was taken");
    (void)late->weight.const_data_ptr();
    return at::equal(before, late->weight) ? std::string() : std::string("it was trained");
  });
}

}  // namespace zoo

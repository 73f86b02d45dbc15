// SPDX-License-Identifier: Apache-2.0
// Memory that runs out in attach(), at whichever allocation: the model is plain and the engine has
// none, so that both can be used again.
#include <cstddef>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/linspace.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "pagoda/base/log.h"
#include "pagoda/torch/engine.h"

namespace {

thread_local bool counting = false;
thread_local std::size_t allocated = 0;  // while counting
thread_local std::size_t refused = 0;    // the one that fails; 0: none

}  // namespace

// Not inlined: the compiler would see malloc() where it expects its own.
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (counting && ++allocated == refused) throw std::bad_alloc();
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*size*/) noexcept {
  std::free(memory);
}

namespace pagoda {
namespace {

constexpr std::int64_t kWidth = 8;
constexpr int kLayers = 4;

::torch::nn::Sequential make_model() {
  ::torch::nn::Sequential out;
  for (int i = 0; i < kLayers; ++i) out->push_back(::torch::nn::Linear(kWidth, kWidth));
  double first = -1;
  for (at::Tensor& parameter : out->parameters()) {
    const at::Tensor flat = at::linspace(first, first + 0.1, parameter.numel());
    parameter.detach().copy_(flat.reshape(parameter.sizes()));
    first += 0.1;
  }
  return out;
}

at::Tensor loss_of(::torch::nn::Sequential& model) {
  return model->forward(at::linspace(-1, 1, kWidth).reshape({1, kWidth})).square().sum();
}

std::vector<at::Tensor> values(const ::torch::nn::Sequential& model) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& parameter : model->parameters()) out.push_back(parameter.detach().clone());
  return out;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].equal(b[i])) return false;
  }
  return a.size() == b.size();
}

Config config() {
  Config out;
  out.device = "cpu";
  out.device_budget = 256_KiB;
  out.host_budget = 64_MiB;
  out.update_threads = 1;
  return out;
}

/// attach() in which the `which`-th allocation fails. Returns how many there were, or none if it
/// threw.
std::optional<std::size_t> attach(Engine& engine, ::torch::nn::Sequential& model,
                                  std::size_t which) {
  allocated = 0;
  refused = which;
  counting = true;
  bool threw = false;
  try {
    engine.attach(*model, Sgd{.lr = 0.125});
  } catch (const std::exception&) {
    threw = true;
  }
  counting = false;
  return threw ? std::nullopt : std::optional(allocated);
}

std::vector<at::Tensor> train_and_release(Engine& engine, ::torch::nn::Sequential& model) {
  for (int step = 0; step < 2; ++step) {
    engine.backward(loss_of(model));
    engine.step();
  }
  engine.release(*model);
  return values(model);
}

TEST(AttachMemory, ThatRunsOutLeavesModelAndEngineAsTheyWere) {
  const log::Capture quiet([](auto, const auto&) {});
  at::set_num_threads(1);
  Engine engine(config());
  auto first = make_model();
  const std::vector<at::Tensor> before = values(first);
  ASSERT_TRUE(attach(engine, first, 0));
  const std::vector<at::Tensor> after = train_and_release(engine, first);
  auto second = make_model();
  const auto count = attach(engine, second, 0);
  ASSERT_TRUE(count);
  EXPECT_TRUE(equal(train_and_release(engine, second), after));

  // The last ones tie torch's parameters to a model that the runtime has attached already.
  constexpr std::size_t kLast = 40;
  ASSERT_GT(*count, kLast);
  std::size_t failures = 0;
  for (std::size_t which = *count - kLast; which <= *count; ++which) {
    SCOPED_TRACE(which);
    auto model = make_model();
    if (!attach(engine, model, which)) {
      ++failures;
      for (const at::Tensor& parameter : model->parameters()) {
        ASSERT_NO_THROW((void)parameter.storage().data());  // it is no page
      }
      EXPECT_TRUE(equal(values(model), before));
      loss_of(model).backward();
      for (at::Tensor& parameter : model->parameters()) {
        ASSERT_TRUE(parameter.grad().defined());  // nobody has taken it
        parameter.mutable_grad().reset();
      }
      ASSERT_TRUE(attach(engine, model, 0));
    }
    EXPECT_TRUE(equal(train_and_release(engine, model), after));
  }
  EXPECT_GT(failures, kLast / 2);  // some attach() allocate a little less than others
}

}  // namespace
}  // namespace pagoda

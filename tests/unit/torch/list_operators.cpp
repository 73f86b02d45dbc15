// SPDX-License-Identifier: Apache-2.0
// How a GPU runs `_foreach_*` over pages that do not fit together, tried on the CPU: kernels in
// front of torch's cut the lists. The results are those of whole lists, in their order.
#include "pagoda/torch/list_operators.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/comm/solo_world.h"
#include "pagoda/torch/engine.h"
#include "pagoda/torch/kernel_pages.h"

namespace pagoda::torch {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kLists = 9;

class ListOperators : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { list_operators::cut_foreach(c10::kCPU); }

  ListOperators() : engine_(config(), comm::make_solo_world()) {
    at::manual_seed(0);
    for (std::int64_t i = 0; i < kLists; ++i) {
      plain_.push_back(at::rand({64 - i % 3, 64}) * 0.5 + 0.25);  // about 16 KiB
      paged_.push_back(plain_.back().clone().requires_grad_(true));
      engine_.adopt(paged_.back(), "list");
      other_.push_back(at::rand_like(plain_.back()) * 0.5 + 0.25);
    }
  }

  static Config config() {
    Config config;
    config.device = "cpu";
    config.device_budget = 64_KiB;
    config.gradient_staging = 1_KiB;
    config.host_budget = 64_MiB;
    config.staging = 64_KiB;
    config.parameters = Placement::Host;
    config.update_threads = 1;
    return config;
  }

  /// The operator's arguments with `first` as its first list.
  static std::vector<c10::IValue> arguments(const c10::FunctionSchema& schema, const Tensors& first,
                                            const Tensors& second) {
    std::vector<c10::IValue> out;
    bool is_first = true;
    for (const c10::Argument& argument : schema.arguments()) {
      const std::string type = argument.type()->str();
      if (type == "Tensor[]") {
        out.emplace_back(std::exchange(is_first, false) ? first : second);
      } else if (argument.default_value()) {
        out.push_back(*argument.default_value());
      } else if (type == "Tensor") {
        const bool many = argument.name() == "scalars";
        out.emplace_back(many ? at::linspace(0.1, 0.9, kLists) : at::scalar_tensor(0.75));
      } else if (type == "Scalar[]" || type == "number[]") {
        c10::List<at::Scalar> scalars;
        for (std::int64_t i = 0; i < kLists; ++i) scalars.push_back(0.25 + 0.125 * double(i));
        out.emplace_back(scalars);
      } else {
        out.emplace_back(at::Scalar(0.5));
      }
    }
    return out;
  }

  /// What the operator gives, or leaves in `first`.
  static Tensors call(const c10::OperatorHandle& op, const Tensors& first, const Tensors& second) {
    std::vector<c10::IValue> stack = arguments(op.schema(), first, second);
    op.callBoxed(&stack);
    return stack.empty() ? first : stack.back().toTensorVector();
  }

  static void expect_equal(const Tensors& paged, const Tensors& plain) {
    ASSERT_EQ(paged.size(), plain.size());
    for (std::size_t i = 0; i < paged.size(); ++i) {
      EXPECT_TRUE(at::equal(paged[i].detach().nan_to_num(77), plain[i].nan_to_num(77))) << i;
    }
  }

  Engine engine_;
  Tensors plain_;
  Tensors paged_;
  Tensors other_;
};

TEST_F(ListOperators, GiveWhatTheyGiveForWholeLists) {
  int tried = 0;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::_foreach_") || name.overload_name.ends_with("out")) continue;
    const auto op = dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    SCOPED_TRACE(toString(op.schema()));
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < paged_.size(); ++i) paged_[i].copy_(plain_[i]);
    Tensors plain;
    for (const at::Tensor& tensor : plain_) plain.push_back(tensor.clone());
    EXPECT_NO_THROW(expect_equal(call(op, paged_, other_), call(op, plain, other_)));
    ++tried;
  }
  EXPECT_GT(tried, 100);
  EXPECT_LE(engine_.stats().device_pages_peak, 63_KiB);
}

TEST_F(ListOperators, ReadPagesInTheirSecondListToo) {
  const at::NoGradGuard no_grad;
  expect_equal(at::_foreach_mul(other_, paged_), at::_foreach_mul(other_, plain_));
  Tensors mine;
  Tensors theirs;
  for (const at::Tensor& tensor : other_) {
    mine.push_back(tensor.clone());
    theirs.push_back(tensor.clone());
  }
  at::_foreach_lerp_(mine, paged_, 0.25);
  at::_foreach_lerp_(theirs, plain_, 0.25);
  expect_equal(mine, theirs);
}

TEST_F(ListOperators, RunInInferenceMode) {
  const c10::InferenceMode inference;
  expect_equal(at::_foreach_exp(paged_), at::_foreach_exp(plain_));
}

TEST_F(ListOperators, AreDifferentiated) {
  Tensors leaves;
  for (const at::Tensor& tensor : plain_) leaves.push_back(tensor.clone().requires_grad_(true));
  const auto gradients = [&](const Tensors& of) {
    at::Tensor sum = at::zeros({});
    for (const at::Tensor& product : at::_foreach_mul(of, of)) sum = sum + product.sum();
    sum.backward();
    Tensors out;
    for (const at::Tensor& tensor : of) out.push_back(tensor.grad());
    return out;
  };
  expect_equal(gradients(paged_), gradients(leaves));
}

TEST_F(ListOperators, MakeSmallerPartsBesidePinnedPages) {
  const at::NoGradGuard no_grad;
  const auto first = engine_.pin(paged_[3]);
  const auto second = engine_.pin(paged_[4]);
  expect_equal(at::_foreach_neg(paged_), at::_foreach_neg(plain_));
}

TEST_F(ListOperators, SayWhatOneElementNeedsThatDoesNotFit) {
  const at::NoGradGuard no_grad;
  std::vector<std::shared_ptr<void>> pins;
  for (std::size_t i = 0; i < 3; ++i) pins.push_back(engine_.pin(paged_[i]));
  try {
    (void)at::_foreach_neg(paged_);
    FAIL() << "four pages fit where three do";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("device_budget"));
  }
  pins.clear();
  expect_equal(at::_foreach_neg(paged_), at::_foreach_neg(plain_));
}

TEST_F(ListOperators, LeaveListsOfOtherLengthsToTorch) {
  const at::NoGradGuard no_grad;
  EXPECT_THROW((void)at::_foreach_add(paged_, Tensors{other_[0]}), c10::Error);
  EXPECT_THROW((void)at::_foreach_add(paged_, std::vector<at::Scalar>{1.0}), c10::Error);
}

TEST_F(ListOperators, FindPagesAnewWhereAParameterHasGotAnotherStorage) {
  Config larger = config();
  larger.gradient_staging = 64_KiB;
  larger.device_budget = 192_KiB;
  Engine engine(larger, comm::make_solo_world());
  at::Tensor parameter = plain_[0].clone().requires_grad_(true);
  engine.attach({{"parameter", parameter}}, {{{}, Sgd{.lr = 0.125}}}, {}, {});
  const at::Tensor before = parameter.detach();
  parameter.set_data(other_[0].clone());
  KernelPages pages;
  pages.add(before, false);  // while it is still the storage of the parameter's page
  pages.add(parameter, false);
  ASSERT_FALSE(pages.touch());
  EXPECT_EQ(*before.const_data_ptr<float>(), *plain_[0].const_data_ptr<float>());
  EXPECT_EQ(*parameter.const_data_ptr<float>(), *other_[0].const_data_ptr<float>());
}

}  // namespace
}  // namespace pagoda::torch

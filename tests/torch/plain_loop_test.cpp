// SPDX-License-Identifier: Apache-2.0
#include "torch/plain_loop.h"

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "torch/torch_loop.h"

namespace zoo {
namespace {

using pagoda::kernels::AdamConfig;
using pagoda::kernels::LionConfig;
using pagoda::kernels::SgdConfig;

/// Every kind that has one type, against the loop that torch's users write.
void expect_near_torch(const Training& training) {
  use_one_torch_thread();
  for (const Kind kind : all_kinds()) {
    if (kind == Kind::Mixed) continue;
    SCOPED_TRACE(name(kind));
    Training here = training;
    // Torch counts the updates of each parameter, we count steps: from the second step on the two
    // differ for an expert that was not used in the first.
    if (kind == Kind::Moe) here.steps = 1;
    const Trained ours = plain_loop({.kind = kind}, here);
    const Trained theirs = torch_loop({.kind = kind}, here);
    EXPECT_LT(relative_distance(ours.parameters, theirs.parameters), 1e-6);
    EXPECT_EQ(ours.losses[0], theirs.losses[0]) << "before any update";
    ASSERT_EQ(ours.norms.size(), theirs.norms.size());
    for (std::size_t i = 0; i < ours.norms.size(); ++i) {
      EXPECT_NEAR(ours.norms[i], theirs.norms[i], 1e-5 * theirs.norms[i]);
    }
  }
}

// Where a gradient is zero but for rounding (the bias of keys, of a convolution before a batch
// norm) a small eps would turn that noise into steps of full size, so it is not small here.
constexpr AdamConfig kAdamW{.lr = 1e-3, .eps = 1e-4, .weight_decay = 0.1};

TEST(PlainLoop, AdamWIsTorchsInNorm) {
  Training training{.steps = 6};
  training.optimizer = kAdamW;
  expect_near_torch(training);
}

TEST(PlainLoop, SoAreClippingAndMicroBatches) {
  Training training{.steps = 4, .micro_batches = 3};
  training.optimizer = kAdamW;
  training.clip = 0.05;
  expect_near_torch(training);
}

TEST(PlainLoop, RanksAverageTheirGradients) {
  // With plain SGD at rate 1, a step of two ranks is half of each rank's own step.
  use_one_torch_thread();
  const Options options{.kind = Kind::Outside};
  const std::vector<Bits> start = parameter_bits(*make(options));
  const std::vector<Bits> g0 = gradient_bits(*make(options), batch_seed(1, 0, 0, 0));
  const std::vector<Bits> g1 = gradient_bits(*make(options), batch_seed(1, 1, 0, 0));
  Training training{.steps = 1, .ranks = 2};
  training.optimizer = SgdConfig{.lr = 1, .momentum = 0};
  const Trained trained = plain_loop(options, training);
  ASSERT_EQ(trained.losses[0].size(), 2U);
  EXPECT_NE(trained.losses[0][0], trained.losses[0][1]);
  const auto floats = [](const Bits& bits) {
    return std::span(reinterpret_cast<const float*>(bits.bytes.data()), bits.bytes.size() / 4);
  };
  for (std::size_t p = 0; p < start.size(); ++p) {
    for (std::size_t i = 0; i < floats(start[p]).size(); ++i) {
      const float expected = floats(start[p])[i] - (floats(g0[p])[i] + floats(g1[p])[i]) * 0.5F;
      ASSERT_EQ(floats(trained.parameters[p])[i], expected) << start[p].name << " " << i;
    }
  }
}

TEST(PlainLoop, TheSameTwice) {
  use_one_torch_thread();
  Training training{.steps = 3, .ranks = 3, .micro_batches = 2, .moments = Dtype::BF16};
  training.clip = 0.5;
  for (const Kind kind : {Kind::Moe, Kind::TiedGpt, Kind::Views}) {
    const Options options{.kind = kind, .dtype = Dtype::BF16};
    const Trained a = plain_loop(options, training), b = plain_loop(options, training);
    EXPECT_EQ(a.losses, b.losses) << name(kind);
    EXPECT_EQ(a.parameters, b.parameters) << name(kind);
  }
}

TEST(PlainLoop, EachChoiceChangesTheBits) {
  // What the reference ignored, an engine could get wrong unseen.
  use_one_torch_thread();
  const Options options{.kind = Kind::Loop, .dtype = Dtype::BF16};
  const Training base{.steps = 4, .ranks = 2, .micro_batches = 2};
  const auto with = [&](auto change) {
    Training training = base;
    change(training);
    return plain_loop(options, training).parameters;
  };
  std::vector<std::vector<Bits>> results{
      with([](Training&) {}),
      with([](Training& t) { t.ranks = 3; }),
      with([](Training& t) { t.micro_batches = 1; }),
      with([](Training& t) { t.optimizer = LionConfig{}; }),
      with([](Training& t) { t.optimizer = SgdConfig{}; }),
      with([](Training& t) { t.moments = Dtype::BF16; }),
      with([](Training& t) { t.accumulation = Dtype::F32; }),
      with([](Training& t) { t.clip = 0.01; }),
      with([](Training& t) { t.data_seed = 2; }),
      with([](Training& t) {
        t.moments = Dtype::BF16;
        t.update_seed = 2;
      }),
  };
  for (std::size_t i = 0; i < results.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(results[i], results[j]) << i << " " << j;
  }
}

TEST(PlainLoop, AParameterThatNobodyUsesStays) {
  use_one_torch_thread();
  const Options options{.kind = Kind::Moe};
  const std::vector<Bits> before = parameter_bits(*make(options));
  const std::vector<Bits> gradients = gradient_bits(*make(options), batch_seed(1, 0, 0, 0));
  Training training{.steps = 1};
  training.optimizer = AdamConfig{.weight_decay = 0.1};  // would move them
  const Trained trained = plain_loop(options, training);
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i] != trained.parameters[i], gradients[i].present) << before[i].name;
  }
}

TEST(PlainLoop, AnOverflowSkipsTheStepAndHalvesTheScale) {
  use_one_torch_thread();
  const Options options{.kind = Kind::Loop, .dtype = Dtype::F16};
  Training training{.steps = 12};
  training.loss_scale = LossScale{.initial = std::ldexp(1.0, 24), .growth_window = 3};
  const std::vector<Bits> before = parameter_bits(*make(options));
  const auto model = make(options);
  bool stayed = false;
  const Trained trained = plain_loop(*model, training, [&](int step) {
    if (step == 0) stayed = parameter_bits(*model) == before;
  });
  EXPECT_TRUE(stayed) << "the first step overflows";
  EXPECT_GT(trained.skipped, 0);
  EXPECT_LT(trained.skipped, 12);
  // Once the scale fits it goes up after three steps: it is below what it was, and not the
  // smallest.
  EXPECT_LT(trained.final_scale, std::ldexp(1.0, 24));
  EXPECT_GT(trained.final_scale, std::ldexp(1.0, 24 - trained.skipped));
  EXPECT_TRUE(std::isfinite(trained.loss(11)));
}

TEST(PlainLoop, APowerOfTwoScaleOnlyMovesTheExponent) {
  // In fp32 nothing is rounded differently: scaling and clipping must agree with no scaling.
  use_one_torch_thread();
  const Options options{.kind = Kind::Loop};
  Training training{.steps = 3};
  training.clip = 0.1;
  const Trained plain = plain_loop(options, training);
  training.loss_scale = LossScale{.initial = 1024};
  const Trained scaled = plain_loop(options, training);
  EXPECT_EQ(plain.losses, scaled.losses);
  EXPECT_EQ(plain.parameters, scaled.parameters);
  EXPECT_EQ(plain.norms, scaled.norms);
}

}  // namespace
}  // namespace zoo

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/adam.h"

#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/kernels/lion.h"
#include "pagoda/kernels/master_split.h"

namespace pagoda::kernels {
namespace {

/// A parameter with fp32 states.
class Trained {
 public:
  explicit Trained(std::size_t count)
      : grad(count), master(count), momentum(count), variance(count) {
    for (float& value : master) value = normal_(random_);
  }

  OptimizerShard shard() {
    OptimizerShard out;
    out.count = grad.size();
    out.grad = grad.data();
    out.master = master.data();
    out.momentum = momentum.data();
    out.variance = variance.data();
    return out;
  }

  void step(const AdamConfig& config, std::uint64_t number) {
    for (float& g : grad) g = 1e-2F * normal_(random_);
    adam_step(config, {number, 0.5, 0}, shard());
  }

  std::vector<float> grad, master, momentum, variance;

 private:
  std::mt19937 random_{17};
  std::normal_distribution<float> normal_;
};

TEST(Adam, SplitMasterTakesTheSameWayAsAWholeOne) {
  Trained trained(777);
  const std::size_t n = trained.grad.size();
  std::vector<Bf16> param(n);
  std::vector<std::int16_t> rest(n);
  std::vector<float> momentum(n), variance(n), joined(n);
  split_masters(trained.master.data(), param.data(), rest.data(), variance.data(), n);
  for (std::uint64_t t = 1; t <= 20; ++t) {
    trained.step({}, t);
    OptimizerShard shard = trained.shard();
    shard.master = nullptr;
    shard.rest = rest.data();
    shard.param = param.data();
    shard.momentum = momentum.data();
    shard.variance = variance.data();
    adam_step({}, {t, 0.5, 0}, shard);
    join_masters(param.data(), rest.data(), variance.data(), joined.data(), n);
    ASSERT_EQ(joined, trained.master) << "step " << t;
    ASSERT_EQ(momentum, trained.momentum);
  }
}

TEST(Adam, AMomentThatDecaysEndsAtZero) {
  Trained trained(64);
  trained.step({}, 1);
  std::ranges::fill(trained.grad, 0.0F);
  for (std::uint64_t t = 2; t < 1000; ++t) adam_step({}, {t, 1, 0}, trained.shard());
  for (const float m : trained.momentum) EXPECT_EQ(m, 0.0F);
}

TEST(Adam, RefusesWhatMakesNoSense) {
  Trained t(8);
  const OptimizerShard good = t.shard();
  EXPECT_NO_THROW(adam_step({}, {}, good));
  EXPECT_THROW(adam_step({.lr = -1}, {}, good), UserError);
  EXPECT_THROW(adam_step({.beta1 = 1}, {}, good), UserError);
  EXPECT_THROW(adam_step({.beta2 = NAN}, {}, good), UserError);
  EXPECT_THROW(adam_step({.eps = -1e-8}, {}, good), UserError);
  EXPECT_THROW(adam_step({}, {.number = 0}, good), UserError);
  EXPECT_THROW(adam_step({}, {.grad_scale = INFINITY}, good), UserError);
  EXPECT_THROW(adam_step({}, {.grad_scale = 1e39}, good), UserError) << "infinite as fp32";

  const auto broken = [&](auto change) {
    OptimizerShard shard = good;
    change(shard);
    EXPECT_THROW(adam_step({}, {}, shard), UserError);
  };
  std::int16_t rest[8];
  Bf16 param[8];
  broken([](OptimizerShard& s) { s.grad = {}; });
  broken([](OptimizerShard& s) { s.master = nullptr; });
  broken([](OptimizerShard& s) { s.momentum = {}; });
  broken([](OptimizerShard& s) { s.variance = {}; });
  broken([](OptimizerShard& s) { s.variance.type = Dtype::BF16; });
  broken([](OptimizerShard& s) { s.momentum.type = s.variance.type = Dtype::F16; });
  broken([&](OptimizerShard& s) { s.rest = rest; });
  broken([&](OptimizerShard& s) {
    s.rest = rest;
    s.master = nullptr;
  });
  broken([](OptimizerShard& s) { s.grad.data = static_cast<const std::byte*>(s.grad.data) + 1; });
  const auto broken_elsewhere = [&](auto change) {
    broken([&](OptimizerShard& s) {
      s.param = param;
      s.to = {t.grad.data(), nullptr, {}, t.grad.data(), t.grad.data()};
      change(s);
    });
  };
  broken_elsewhere([](OptimizerShard& s) { s.to.master = nullptr; });
  broken_elsewhere([](OptimizerShard& s) { s.to.momentum = {}; });
  broken_elsewhere([](OptimizerShard& s) { s.to.variance.type = Dtype::BF16; });
  broken_elsewhere([&](OptimizerShard& s) { s.to.rest = rest; });
  broken_elsewhere([&](OptimizerShard& s) { s.to.param = param; });  // it is not read
  broken_elsewhere([](OptimizerShard& s) {
    s.to.variance.data = static_cast<std::byte*>(s.to.variance.data) + 2;
  });
  OptimizerShard lion = good;
  EXPECT_THROW(lion_step({}, {}, lion), UserError);  // a variance that it would not use
  lion.variance = {};
  EXPECT_NO_THROW(lion_step({}, {}, lion));
}

TEST(Adam, AnEmptyShardIsNothing) {
  EXPECT_NO_THROW(adam_step({}, {}, OptimizerShard{}));
}

}  // namespace
}  // namespace pagoda::kernels

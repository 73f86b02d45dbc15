// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/sgd.h"

#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace pagoda::kernels {
namespace {

TEST(Sgd, TheFirstStepTakesTheGradientWithoutDampening) {
  std::vector<float> grad(5, 2.0F), master(5, 1.0F), momentum(5, 0.0F);
  OptimizerShard shard;
  shard.count = 5;
  shard.grad = grad.data();
  shard.master = master.data();
  shard.momentum = momentum.data();
  const SgdConfig config{.lr = 0.25, .momentum = 0.5, .dampening = 0.5};
  sgd_step(config, {.number = 1}, shard);
  EXPECT_EQ(momentum[4], 2.0F);
  EXPECT_EQ(master[4], 0.5F);
  sgd_step(config, {.number = 2}, shard);
  EXPECT_EQ(momentum[4], 0.5F * 2.0F + 0.5F * 2.0F);
  EXPECT_EQ(master[4], 0.0F);
}

TEST(Sgd, MomentumIsThereExactlyWhenItIsUsed) {
  std::vector<float> grad(5, 2.0F), master(5, 1.0F), momentum(5, 0.0F);
  OptimizerShard shard;
  shard.count = 5;
  shard.grad = grad.data();
  shard.master = master.data();
  EXPECT_THROW(sgd_step({}, {}, shard), UserError);
  EXPECT_NO_THROW(sgd_step({.momentum = 0}, {}, shard));
  EXPECT_THROW(sgd_step({.momentum = 0, .nesterov = true}, {}, shard), UserError);
  shard.momentum = momentum.data();
  EXPECT_THROW(sgd_step({.momentum = 0}, {}, shard), UserError);
  EXPECT_NO_THROW(sgd_step({}, {}, shard));
}

}  // namespace
}  // namespace pagoda::kernels

// SPDX-License-Identifier: Apache-2.0
// Gradients that are larger than what may wait on the device: they leave it before backward goes
// on, whatever other ranks do, and give the same bits.
#include <latch>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/comm/solo_world.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

class LargeGradients : public testing::TestWithParam<std::tuple<int, unsigned>> {
 protected:
  LargeGradients() {
    r.config = tiny();
    r.config.gradient_staging = 9_KiB;  // three of six pages have larger ones, one just fits
    r.config.device_budget = 80_KiB + r.config.gradient_staging;
    std::tie(r.ranks, r.config.zero) = GetParam();
  }

  Rehearsal r;
};

TEST_P(LargeGradients, GiveTheBitsOfTheKernels) {
  for (const int micro_batches : {1, 3}) {
    r.micro_batches = micro_batches;
    EXPECT_NO_THROW(rehearse(r)) << micro_batches;
  }
}

TEST_P(LargeGradients, SoWithANormAndPagesLeftOut) {
  r.config.clip = 0.5;
  r.config.gradient_dtype = GradientType::Fp32;
  r.config.gradient_staging = 1;
  r.all_contribute = false;
  r.micro_batches = 2;
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(LargeGradients, SoOnAnAsynchronousDeviceWithStatesOnDisk) {
  const io::ScratchDirectory directory;
  r.config.device = "emulated";
  r.config.check_order = true;
  r.config.parameters = r.config.gradients = r.config.optimizer_state = Placement::Nvme;
  r.config.nvme = {directory.path().string()};
  r.config.nvme_budget = 16_MiB;
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(LargeGradients, SoOfPagesThatAreThawed) {
  r.steps = 5;
  r.frozen = {3, 1, 4};
  r.thawed = [](int /*rank*/, int step, int /*micro*/, std::size_t page) {
    return step >= static_cast<int>(page) - 1;
  };
  EXPECT_NO_THROW(rehearse(r));
}

INSTANTIATE_TEST_SUITE_P(, LargeGradients,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(0U, 1U, 3U)),
                         kRanksAndStage);

SmallRank::Options with_large_gradients() {
  SmallRank::Options out;
  out.config = tiny();
  out.config.gradient_staging = 4_KiB;
  return out;
}

TEST(LargeGradient, IsGoneWhenItHasBeenHandedOver) {
  SmallRank::Options mine = with_large_gradients();
  std::vector<SmallRank::Bits> trained[2];
  for (const bool large : {true, false}) {
    if (!large) mine.config.gradient_staging = 64_KiB;
    SmallRank rank(mine, comm::make_solo_world());
    rank.attach();
    for (int step = 0; step < 3; ++step) {
      rank.runtime().begin_backward(true);
      for (const std::size_t page : {3U, 2U, 1U, 0U}) {
        const std::weak_ptr<void> gradient = rank.contribute(page, step);
        if (large && (page == 2 || page == 1)) {
          EXPECT_TRUE(gradient.expired());
        }
      }
      rank.runtime().end_backward();
      rank.step();
    }
    EXPECT_EQ(rank.runtime().stats().gradients.large, large ? 6U : 0U);
    trained[large ? 1 : 0] = rank.values();
  }
  EXPECT_EQ(trained[0], trained[1]);
}

TEST(LargeGradient, WaitsForNoOtherRank) {
  std::latch first_is_done{1};
  std::vector<SmallRank::Bits> out[2];
  const auto ended = run_ranks(2, [&](auto world) {
    const bool first = world->rank() == 0;
    SmallRank rank(with_large_gradients(), std::move(world));
    rank.attach();
    if (!first) first_is_done.wait();
    rank.runtime().begin_backward(true);
    const std::weak_ptr<void> gradient = rank.contribute(2, 0);
    if (first) {  // the other one has not begun
      EXPECT_TRUE(gradient.expired());
      first_is_done.count_down();
    }
    for (const std::size_t page : {3U, 1U, 0U}) (void)rank.contribute(page, 0);
    rank.runtime().end_backward();
    rank.step();
    out[first ? 0 : 1] = rank.values();
    rank.join();
  });
  EXPECT_THAT(ended, testing::Each(std::string()));
  EXPECT_EQ(out[0], out[1]);
}

}  // namespace
}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/runtime.h"

#include <gtest/gtest.h>

#include "unit/engine/rehearsal.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

/// Small pieces, and a device that holds little more than the largest operator.
Config tiny() {
  Config config;
  config.device = "cpu";
  config.device_budget = 100_KiB + 60_KiB;
  config.gradient_staging = 80_KiB;
  config.parameters = config.gradients = config.optimizer = Placement::Host;
  config.staging = 16_KiB;
  config.update_chunk = 16_KiB;
  config.update_buffers = 2;
  config.bucket = 24_KiB;
  config.fetch_threads = 2;
  config.update_threads = 2;
  return config;
}

class RuntimeRanks : public testing::TestWithParam<std::tuple<int, unsigned>> {};

TEST_P(RuntimeRanks, EveryTouchSeesTheBytesOfTheKernels) {
  Rehearsal r;
  r.config = tiny();
  std::tie(r.ranks, r.config.zero) = GetParam();
  r.touching_threads = 2;
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(RuntimeRanks, SoWithPagesLeftOutAndSeveralMicroBatches) {
  Rehearsal r;
  r.config = tiny();
  std::tie(r.ranks, r.config.zero) = GetParam();
  r.config.clip = 0.5;
  r.config.prefetch = false;
  r.config.gradient_dtype = GradientType::Fp32;
  r.micro_batches = 2;
  r.all_contribute = false;
  r.optimizer = Sgd{.lr = 0.1, .momentum = 0.9};
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(RuntimeRanks, SoWithWritesOfUserCode) {
  Rehearsal r;
  r.config = tiny();
  std::tie(r.ranks, r.config.zero) = GetParam();
  r.writes = true;
  r.steps = 4;
  EXPECT_NO_THROW(rehearse(r));
  r.config.master = Master::Split;
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(RuntimeRanks, SoOnAnAsynchronousDeviceWithStatesOnDisk) {
  const io::ScratchDirectory directory;
  Rehearsal r;
  r.config = tiny();
  std::tie(r.ranks, r.config.zero) = GetParam();
  r.config.device = "emulated";
  r.config.check_order = true;
  r.config.parameters = r.config.gradients = r.config.optimizer = Placement::Nvme;
  r.config.nvme = {directory.path().string()};
  r.config.nvme_budget = 16_MiB;
  r.config.moments = MomentType::Bf16;
  r.config.master = Master::Split;
  r.writes = true;
  EXPECT_NO_THROW(rehearse(r));
}

INSTANTIATE_TEST_SUITE_P(, RuntimeRanks,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(0U, 1U, 3U)),
                         [](const auto& info) {
                           return fmt::format("{}RanksZero{}", std::get<0>(info.param),
                                              std::get<1>(info.param));
                         });

TEST(Runtime, PagesOnTheDeviceAreWrittenAndUpdatedInPlace) {
  for (const auto master : {Master::Whole, Master::Split}) {
    for (const bool writes : {false, true}) {
      Rehearsal r;
      r.config = tiny();
      r.config.device_budget = 1_MiB;
      r.config.parameters = Placement::Auto;
      r.config.master = master;
      r.writes = writes;
      r.touching_threads = 3;
      EXPECT_NO_THROW(rehearse(r)) << writes;
      r.ranks = 2;
      r.config.zero = 2;
      EXPECT_NO_THROW(rehearse(r)) << writes;
    }
  }
}

}  // namespace
}  // namespace pagoda::engine

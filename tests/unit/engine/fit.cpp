// SPDX-License-Identifier: Apache-2.0
// Whether a model's states fit is said before anything moves, and not too strictly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/comm/solo_world.h"
#include "pagoda/engine/runtime.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

constexpr std::uint64_t kFitElements = 256 << 10;
constexpr Bytes kFitParameter = kFitElements * sizeof(float);

/// Attaches one page of 1 MiB whose states, 4 MiB with AdamW, all go to disk.
void attach_on_disk(Bytes nvme_budget) {
  const io::ScratchDirectory scratch;
  Config config;
  config.device = "cpu";
  config.device_budget = 4 * kFitParameter;
  config.gradient_staging = kFitParameter;
  config.nvme = {scratch.path().string()};
  config.nvme_budget = nvme_budget;
  config.parameters = config.gradients = config.optimizer = Placement::Nvme;
  Runtime runtime(config, comm::make_solo_world());
  const std::vector<std::byte> zeros(kFitParameter);
  pager::Page& page =
      runtime.pager().adopt("w", kFitElements, sizeof(float), pager::Placement::Nvme, zeros.data(),
                            device::Direction::HostToHost);
  runtime.attach(
      {&page},
      {{&page, kernels::Dtype::F32, {{{0, kFitElements}, 0, 0}}, {{0, 0, 0, false, false}}}},
      {AdamW{}});
}

TEST(Fit, WhatLiesOnDiskAlreadyIsNotCountedTwice) {
  EXPECT_NO_THROW(attach_on_disk(4 * kFitParameter + 1_MiB - 64_KiB));
}

TEST(Fit, TooLittleDiskIsRefusedWithSizes) {
  try {
    attach_on_disk(3 * kFitParameter);
    ADD_FAILURE() << "4 MiB were put into 3 MiB";
  } catch (const UserError& error) {
    EXPECT_THAT(error.message(), testing::HasSubstr("raise nvme_budget to 4 MiB"));
  }
}

}  // namespace
}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
// Every use of device memory is ordered after the ones that it depends on, and the checker that
// says so sees a wait that is missing.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "torch/paged_loop.h"
#include "torch/trainee.h"
#include "unit/io/scratch_directory.h"

namespace zoo {
namespace {

using pagoda::Placement;
using ::testing::HasSubstr;
namespace emulated = pagoda::device::emulated;
namespace device = pagoda::device;

/// An emulated device with a checker, and links slow enough that a forgotten wait could matter.
emulated::Options checked_device() {
  emulated::Options options;
  options.host_to_device = {.bytes_per_second = 2e9, .latency = 5'000};
  options.device_to_host = {.bytes_per_second = 2e9, .latency = 5'000};
  options.checker = std::make_shared<device::OrderingChecker>();
  return options;
}

struct Case {
  std::string name;
  Kind kind;
  int ranks;
  unsigned zero;
  Placement parameters;
};

class DeviceOrder : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceOrder, HoldsAndTrainingIsExact) {
  use_one_torch_thread();
  const Case& here = GetParam();
  const pagoda::io::ScratchDirectory scratch;
  const Options options{.kind = here.kind};
  const Training training{.steps = 3, .ranks = here.ranks, .micro_batches = 2};
  pagoda::Config config = crowded(options);
  config.device = "emulated";
  config.zero = here.zero;
  config.parameters = here.parameters;
  config.nvme = {scratch.path().string()};
  config.nvme_budget = 32U << 20U;
  // A device for all ranks' engines would be another machine's: each gets its own checker.
  config.check_order = true;
  const auto setup = std::make_shared<emulated::Options>(checked_device());
  config.emulated = setup;
  if (here.ranks == 1) config.check_order = false;  // ours, so that it can be looked at
  const PagedTrained paged = paged_loop(options, training, config);
  const Trained plain = plain_loop(options, training);
  EXPECT_EQ(paged.losses, plain.losses);
  EXPECT_EQ(paged.parameters, plain.parameters);
  EXPECT_THAT(setup->checker->take_violations(), ::testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Cases, DeviceOrder,
                         ::testing::Values(Case{"gpt_host", Kind::Gpt, 1, 3, Placement::Host},
                                           Case{"moe_nvme", Kind::Moe, 1, 3, Placement::Nvme},
                                           Case{"conv_host", Kind::Conv, 1, 3, Placement::Host},
                                           Case{"views_host", Kind::Views, 1, 3, Placement::Host},
                                           Case{"gpt_two_ranks", Kind::Gpt, 2, 3, Placement::Host},
                                           Case{"moe_two_ranks_stage_one", Kind::Moe, 2, 1,
                                                Placement::Host}),
                         [](const auto& info) { return info.param.name; });

class DroppedWaits : public ::testing::TestWithParam<pagoda::pager::DroppedWait> {};

TEST_P(DroppedWaits, AreSeen) {
  use_one_torch_thread();
  const pagoda::log::Capture quiet([](auto, const auto&) {});
  const Options options{.kind = Kind::Gpt};
  pagoda::Config config = crowded(options);
  config.device = "emulated";
  const auto setup = std::make_shared<emulated::Options>(checked_device());
  config.emulated = setup;
  config.dropped_wait = GetParam();
  const Ending ending = ending_of([&] {
    Trainee trainee(options, {}, config);
    for (int step = 0; step < 3; ++step) trainee.train(step);
    trainee.finish();
  });
  EXPECT_TRUE(ending.threw);
  EXPECT_THAT(ending.text, HasSubstr("nothing orders the second after the first"));
  EXPECT_THAT(setup->checker->take_violations(), ::testing::Not(::testing::IsEmpty()));
}

INSTANTIATE_TEST_SUITE_P(Waits, DroppedWaits,
                         ::testing::Values(pagoda::pager::DroppedWait::Room,
                                           pagoda::pager::DroppedWait::Ready),
                         [](const auto& info) {
                           return info.param == pagoda::pager::DroppedWait::Room ? "room" : "ready";
                         });

}  // namespace
}  // namespace zoo

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/runtime.h"

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/thread_world.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"
#include "unit/io/scratch_directory.h"
namespace pagoda::engine {
namespace {

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
  r.config.parameters = r.config.gradients = r.config.optimizer_state = Placement::Nvme;
  r.config.nvme = {directory.path().string()};
  r.config.nvme_budget = 16_MiB;
  r.config.moments = MomentType::Bf16;
  r.config.master = Master::Split;
  r.writes = true;
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(RuntimeRanks, SoWithRowsThatAreLookedUpWhereTheyLie) {
  Rehearsal r;
  r.config = tiny();
  std::tie(r.ranks, r.config.zero) = GetParam();
  r.config.lookup_in_place = 1;
  r.config.moments = MomentType::Bf16;
  r.config.master = Master::Split;
  r.looks_up = true;
  r.touching_threads = 2;
  r.steps = 5;
  for (const bool prefetch : {false, true}) {
    r.config.prefetch = prefetch;
    r.micro_batches = prefetch ? 2 : 1;
    r.config.clip = prefetch ? 0.5 : 0;
    std::vector<std::uint64_t> lookups(static_cast<std::size_t>(r.ranks));
    EXPECT_NO_THROW(rehearse(r, comm::make_thread_worlds(r.ranks), [&](int rank, Runtime& runtime) {
      lookups[static_cast<std::size_t>(rank)] = runtime.stats().pager.lookups;
    }));
    // One in each step at least, and one of each thread in each forward at most, where a rank has
    // all of the page and updates all of it, unless a prefetch has brought the page in.
    const bool in_place = r.ranks == 1 || r.config.zero == 0;
    const auto forwards = static_cast<unsigned>(r.steps * r.micro_batches) + 2;  // two at the end
    EXPECT_THAT(lookups, testing::Each(testing::Le(in_place ? forwards * r.touching_threads : 0U)));
    if (!prefetch) {
      EXPECT_THAT(lookups, testing::Each(testing::Ge(in_place ? 5U : 0U)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RuntimeRanks,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(0U, 1U, 3U)),
                         kRanksAndStage);

class EarlyUpdates : public testing::TestWithParam<std::tuple<int, unsigned>> {
 protected:
  /// Trains and returns how many updates each rank began before their step().
  std::vector<std::uint64_t> early_updates() {
    std::vector<std::uint64_t> out(static_cast<std::size_t>(r.ranks));
    rehearse(r, comm::make_thread_worlds(r.ranks), [&](int rank, Runtime& runtime) {
      out[static_cast<std::size_t>(rank)] = runtime.stats().updates.early;
    });
    return out;
  }
  void SetUp() override {
    r.config = tiny();
    r.config.prefetch = false;  // a page that is just being fetched waits for step()
    r.steps = 4;
    std::tie(r.ranks, r.config.zero) = GetParam();
  }
  /// In the third step, when all updates have begun.
  auto in_third_step(std::function<void(Runtime&)> then) {
    return [this, then = std::move(then)](int step, Runtime& runtime) {
      if (step != 2) return;
      while (runtime.stats().updates.early < 2 * r.pages.size()) std::this_thread::yield();
      then(runtime);
    };
  }
  std::vector<std::uint64_t> on_each_rank(std::uint64_t count) const {
    return std::vector<std::uint64_t>(static_cast<std::size_t>(r.ranks), count);
  }

  Rehearsal r;
};

TEST_P(EarlyUpdates, BeginDuringEveryBackwardButTheFirst) {
  EXPECT_EQ(early_updates(), on_each_rank(3 * r.pages.size()));
  r.micro_batches = 2;
  EXPECT_EQ(early_updates(), on_each_rank(3 * r.pages.size()));
}

TEST_P(EarlyUpdates, WaitForTheStepWhereTheNormIsNeeded) {
  r.config.clip = 0.5;
  EXPECT_EQ(early_updates(), on_each_rank(0));
}

TEST_P(EarlyUpdates, CanBeSwitchedOff) {
  r.config.early_updates = false;
  EXPECT_EQ(early_updates(), on_each_rank(0));
}

// Whatever has been computed of an update: a parameter is read as it was until step().
TEST_P(EarlyUpdates, AreNotSeenBeforeTheStep) {
  r.steps = 6;
  r.touching_threads = 2;
  for (const int from : {0, 3}) {  // as a habit, and out of the blue
    r.late_from = from;
    for (const bool prefetch : {false, true}) {
      r.config.prefetch = prefetch;
      r.looks_up = prefetch;
      r.config.lookup_in_place = prefetch ? 1 : 0;
      for (const auto master : {Master::Whole, Master::Split}) {
        r.config.master = master;
        // At once, or with all updates computed.
        r.before_step = {};
        if (prefetch) {
          r.before_step = [](int, Runtime& runtime, const auto&) { runtime.finish(); };
        }
        EXPECT_EQ(early_updates(), on_each_rank(5 * r.pages.size()));
      }
    }
  }
}

TEST_P(EarlyUpdates, AreNotSeenBeforeTheStepWhateverLiesWhere) {
  const io::ScratchDirectory directory;
  r.steps = 4;
  r.late_from = 2;
  r.config.nvme = {directory.path().string()};
  r.config.nvme_budget = 16_MiB;
  const auto choices = {Placement::Host, Placement::Nvme};
  for (const auto parameters : choices) {
    for (const auto gradients : choices) {
      for (const auto optimizer : choices) {
        r.config.parameters = parameters;
        r.config.gradients = gradients;
        r.config.optimizer_state = optimizer;
        for (const auto gradient_dtype : {GradientType::Parameter, GradientType::Fp32}) {
          r.config.gradient_dtype = gradient_dtype;
          const std::uint64_t early = early_updates()[0];
          if (gradient_dtype == GradientType::Parameter && parameters == gradients &&
              r.config.zero != 1) {
            EXPECT_EQ(early, 3 * r.pages.size());
          }
        }
      }
    }
  }
}

TEST_P(EarlyUpdates, AreNotSeenBeforeTheStepOnPagesThatNeverLeaveTheDevice) {
  r.config.device_budget = 1_MiB;
  r.config.parameters = Placement::Auto;
  r.late_from = 2;
  for (const auto dtype : {kernels::Dtype::BF16, kernels::Dtype::F32}) {
    r.dtype = dtype;
    EXPECT_EQ(early_updates(), on_each_rank(3 * r.pages.size()));
  }
}

TEST_P(EarlyUpdates, GiveWayToAHabitOfTheUser) {
  const auto habit = [](int /*step*/, Runtime& runtime, const auto& /*pages*/) {
    const double lr = optim::learning_rate(runtime.groups()[0]);
    runtime.set_learning_rate(0, lr / 2);
    runtime.set_learning_rate(0, lr);
  };
  r.before_step = habit;
  EXPECT_EQ(early_updates(), on_each_rank(0));
  r.before_step = {};
  r.in_backward = habit;
  EXPECT_EQ(early_updates(), on_each_rank(0));
}

// In the window, whether an update has begun or not; and the step completes as if nothing had been.
TEST_P(EarlyUpdates, RefuseWhatWouldChangeThem) {
  const auto refused = [](int step, Runtime& runtime, const auto& pages) {
    if (step != 2) return;
    EXPECT_THROW(runtime.set_learning_rate(0, 0.5), UserError);
    EXPECT_THROW(runtime.zero_grad(), UserError);
    EXPECT_THROW(runtime.begin_backward(true), UserError);
    EXPECT_THROW(runtime.grad_norm(), UserError);
    std::vector<float> gradient(pages[1]->elements);
    EXPECT_THROW(runtime.read_gradient(*pages[1], gradient), UserError);
    const pager::Access access{pages[1], true};
    EXPECT_THROW((void)runtime.pager().touch({&access, 1}, 0, nullptr), UserError);
  };
  for (const bool ends : {true, false}) {  // a pass that an exception has ended never ends
    (ends ? r.before_step : r.in_backward) = refused;
    EXPECT_EQ(early_updates(), on_each_rank(3 * r.pages.size()));  // …and go on as before
    r.before_step = r.in_backward = {};
  }
}

TEST_P(EarlyUpdates, HaveTheRateOfTheirStepOnARankWithoutABackward) {
  r.idle_rank = r.ranks > 1 ? r.ranks - 1 : -1;  // somebody must have one
  r.learning_rates = {0.1, 0.01, 0.001};
  EXPECT_EQ(early_updates(), on_each_rank(3 * r.pages.size()));
}

TEST_P(EarlyUpdates, GiveWayToAHabitOfLookingAtGradients) {
  r.before_step = [](int, Runtime& runtime, const auto&) { runtime.grad_norm(); };
  EXPECT_EQ(early_updates(), on_each_rank(0));
  r.idle_rank = r.ranks > 1 ? r.ranks - 1 : -1;
  EXPECT_EQ(early_updates(), on_each_rank(0));
}

INSTANTIATE_TEST_SUITE_P(, EarlyUpdates,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(0U, 1U, 3U)),
                         kRanksAndStage);

/// Whether another thread gets an answer that takes the locks of the runtime.
bool answers(const Runtime& runtime) {
  auto told = std::make_shared<std::promise<void>>();
  auto answer = told->get_future();
  std::thread([&runtime, told] {
    (void)runtime.stats();
    told->set_value();
  }).detach();
  return answer.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
}

/// A gradient whose memory says, as it goes, whether a lock was held: Python's may be needed there.
Contribution watched_gradient(SmallRank& rank, std::size_t page, std::atomic<int>& dropped,
                              std::atomic<int>& under_lock) {
  const auto bytes = std::make_shared<SmallRank::Bits>(rank.page(page).bytes());
  Contribution out;
  out.page = rank.runtime().trained(rank.page(page));
  out.present = {true};
  out.data = bytes->data();
  out.keep = {bytes.get(), [&rank, &dropped, &under_lock, bytes](void*) {
                if (!answers(rank.runtime())) ++under_lock;
                ++dropped;
              }};
  return out;
}

class GradientsGo : public testing::TestWithParam<int> {};

TEST_P(GradientsGo, WithoutALock) {
  const auto ended = run_ranks(GetParam(), [&](auto world) {
    std::atomic<int> dropped = 0;
    std::atomic<int> under_lock = 0;
    SmallRank::Options options;
    options.config = tiny();
    SmallRank rank(options, std::move(world));
    rank.attach();
    rank.runtime().begin_backward(true);
    for (std::size_t p = 0; p < 4; ++p) {
      rank.runtime().contribute(watched_gradient(rank, p, dropped, under_lock));
    }
    rank.runtime().end_backward();
    rank.step();
    EXPECT_EQ(dropped, 4);
    EXPECT_EQ(under_lock, 0);
    rank.release();
  });
  EXPECT_THAT(ended, testing::Each(std::string()));
}

INSTANTIATE_TEST_SUITE_P(Ranks, GradientsGo, testing::Values(1, 2));

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

/// What ranks of stage 0 have after two steps, where rank 1 may have another place for gradients
/// and other staging buffers than rank 0.
std::vector<SmallRank::Bits> trained_by_stage_0(bool alike) {
  const io::ScratchDirectory scratch;
  std::vector<std::vector<SmallRank::Bits>> out(2);
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine;
    mine.config = tiny();
    mine.config.zero = 0;
    mine.config.nvme = {scratch.path().string()};
    mine.config.nvme_budget = 16_MiB;
    const bool other = world->rank() == 1 && !alike;
    mine.config.gradients = other ? Placement::Nvme : Placement::Host;
    mine.config.staging = other ? 40_KiB : 16_KiB;
    SmallRank rank(mine, world);
    rank.attach();
    for (int step = 0; step < 2; ++step) {
      rank.backward(step);
      rank.runtime().grad_norm();
      std::vector<float> gradient(rank.page(2).elements);
      rank.runtime().read_gradient(rank.page(2), gradient);
      rank.step();
    }
    out[static_cast<std::size_t>(world->rank())] = rank.values();
    rank.join();
  });
  EXPECT_THAT(ended, testing::Each(std::string()));
  EXPECT_EQ(out[0], out[1]);
  return out[0];
}

TEST(Runtime, RanksGatherGradientsThroughBuffersOfDifferentSizes) {
  EXPECT_EQ(trained_by_stage_0(true), trained_by_stage_0(false));
}

TEST(Runtime, ShardsOnTheDeviceLeaveRoomForAWholePage) {
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine;
    mine.config = tiny();
    mine.config.parameters = Placement::Device;
    mine.config.gradient_staging = 256_KiB;
    mine.config.device_budget = 2 * 256_KiB;  // for gradients, and for a page or half of one
    mine.pages = {64 << 10};
    {
      SmallRank rank(mine, world);
      EXPECT_THAT(thrown_by([&] { rank.attach(); }),
                  testing::HasSubstr("raise device_budget to at least 640 KiB"));
    }
    mine.config.device_budget = 640_KiB;
    SmallRank rank(mine, world);
    rank.attach();
    EXPECT_EQ(rank.values(), rank.initial());
  });
  EXPECT_THAT(ended, testing::Each(std::string()));
}

}  // namespace
}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
// Ranks that take different paths stay exact and never wait for each other forever; one that throws
// or stops ends the others with an error. A hang is CTest's time-out.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/comm/thread_world.h"
#include "torch/paged_loop.h"
#include "torch/ranks.h"
#include "torch/trainee.h"

namespace zoo {
namespace {

using ::testing::HasSubstr;

void expect_equal(const Trained& paged, const Trained& plain) {
  EXPECT_EQ(paged.losses, plain.losses);
  ASSERT_EQ(paged.parameters.size(), plain.parameters.size());
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_EQ(paged.parameters[i], plain.parameters[i]) << plain.parameters[i].name;
  }
}

class NoHangAtStage : public ::testing::TestWithParam<unsigned> {
 protected:
  pagoda::Config config(const Options& options) {
    pagoda::Config config = crowded(options);
    config.zero = GetParam();
    return config;
  }
};

TEST_P(NoHangAtStage, EveryRankMayUseOtherExperts) {
  use_one_torch_thread();
  const Options options{.kind = Kind::Moe};
  for (const int ranks : {2, 3, 4}) {
    SCOPED_TRACE(ranks);
    const Training training{.steps = 4, .ranks = ranks, .micro_batches = 2};
    expect_equal(paged_loop(options, training, config(options)), plain_loop(options, training));
  }
}

TEST_P(NoHangAtStage, UnequalNumbersOfMicroBatchesAddUpAsIfTheMissingWereZero) {
  use_one_torch_thread();
  constexpr int kRanks = 3;
  constexpr int kSteps = 3;
  const Options options{.kind = Kind::Moe};
  Training training{.steps = kSteps, .ranks = kRanks, .micro_batches = kRanks};
  training.has_batch = [](int rank, int, int micro) { return micro <= rank; };
  const Trained plain = plain_loop(options, training);

  std::vector<std::vector<Bits>> results(kRanks);
  const auto endings = run_ranks(kRanks, [&](const auto& world) {
    Trainee trainee(options, training, config(options), world);
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro <= world->rank(); ++micro) {
        trainee.forward(step, micro);
        trainee.backward();
      }
      trainee.step();
    }
    trainee.finish();
    results[static_cast<std::size_t>(world->rank())] = trainee.parameters();
  });
  for (const Ending& ending : endings) ASSERT_FALSE(ending.threw) << ending.text;
  for (const auto& result : results) EXPECT_EQ(result, plain.parameters);
}

TEST_P(NoHangAtStage, ARankOutOfDataJoins) {
  use_one_torch_thread();
  constexpr int kRanks = 3;
  const Options options{.kind = Kind::Moe};
  const auto steps_of = [](int rank) { return 1 + 2 * ((rank + 1) % kRanks); };  // 3, 5, 1
  Training training{.steps = 5, .ranks = kRanks};
  training.has_batch = [&](int rank, int step, int) { return step < steps_of(rank); };
  const Trained plain = plain_loop(options, training);

  std::vector<std::vector<Bits>> results(kRanks);
  std::vector<std::vector<std::uint32_t>> losses(kRanks);
  const auto endings = run_ranks(kRanks, [&](const auto& world) {
    const auto rank = static_cast<std::size_t>(world->rank());
    Trainee trainee(options, training, config(options), world);
    for (int step = 0; step < steps_of(world->rank()); ++step) {
      losses[rank].push_back(trainee.train(step));
    }
    trainee.join();
    trainee.finish();
    results[rank] = trainee.parameters();
  });
  for (const Ending& ending : endings) ASSERT_FALSE(ending.threw) << ending.text;
  for (const auto& result : results) EXPECT_EQ(result, plain.parameters);
  for (std::size_t step = 0; step < plain.losses.size(); ++step) {
    std::vector<std::uint32_t> here;
    for (const auto& mine : losses) {
      if (step < mine.size()) here.push_back(mine[step]);
    }
    EXPECT_EQ(here, plain.losses[step]) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, NoHangAtStage, ::testing::Values(0U, 1U, 2U, 3U),
                         ::testing::PrintToStringParamName());

/// Where a rank leaves.
struct Exit {
  std::string name;
  unsigned zero;
  bool in_backward;  // between forward and step, else between two steps
};

class NoHangAfter : public ::testing::TestWithParam<Exit> {
 protected:
  static constexpr int kRanks = 3;
  static constexpr int kLost = 1;

  std::vector<Ending> run(bool throws) {
    const Options options{.kind = Kind::Gpt};
    const Training training{.ranks = kRanks};
    pagoda::Config config = crowded(options);
    config.zero = GetParam().zero;
    config.timeout = 2;
    config.heartbeat = 0.1;
    return run_ranks(kRanks, [&](const auto& world) {
      Trainee trainee(options, training, config, world);
      for (int step = 0;; ++step) {
        trainee.forward(step);
        if (step == 2 && world->rank() == kLost) {
          if (GetParam().in_backward) trainee.backward();
          if (throws) throw std::runtime_error("the user's own");
          return;
        }
        trainee.backward();
        trainee.step();
      }
    });
  }
};

TEST_P(NoHangAfter, AnExceptionTheOthersEndWithAnErrorThatNamesTheRank) {
  const auto endings = run(true);
  EXPECT_THAT(endings[kLost].text, HasSubstr("the user's own"));
  for (const int rank : {0, 2}) {
    const Ending& ending = endings[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(ending.threw);
    EXPECT_THAT(ending.text, HasSubstr("rank 1")) << "on rank " << rank;
  }
}

TEST_P(NoHangAfter, ARankThatStopsTheOthersEndWithAnErrorThatNamesIt) {
  const auto endings = run(false);
  EXPECT_FALSE(endings[kLost].threw) << endings[kLost].text;
  for (const int rank : {0, 2}) {
    const Ending& ending = endings[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(ending.threw);
    EXPECT_THAT(ending.text, HasSubstr("rank 1")) << "on rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Exits, NoHangAfter,
                         ::testing::Values(Exit{"zero3_forward", 3, false},
                                           Exit{"zero3_backward", 3, true},
                                           Exit{"zero1_forward", 1, false},
                                           Exit{"zero0_backward", 0, true}),
                         [](const auto& info) { return info.param.name; });

TEST(NoHangOverGloo, RanksThatAreThreadsTrainExactly) {
  use_one_torch_thread();
  const Options options{.kind = Kind::Moe};
  for (const unsigned zero : {1U, 3U}) {
    const Training training{.steps = 3, .ranks = 3};
    pagoda::Config config = crowded(options);
    config.zero = zero;
    expect_equal(paged_loop(options, training, config, gloo_worlds(3)),
                 plain_loop(options, training));
  }
}

}  // namespace
}  // namespace zoo

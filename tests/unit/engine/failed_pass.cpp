// SPDX-License-Identifier: Apache-2.0
// The last pass of a step fails: what the window of early updates is then.
#include <functional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/solo_world.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"

namespace pagoda::engine {
namespace {

SmallRank::Options small_model(double clip_ahead_of = 0) {
  SmallRank::Options out;
  out.config = tiny();
  out.config.prefetch = false;  // a page that is just being fetched waits for step()
  out.config.clip = clip_ahead_of;
  out.config.clip_ahead = clip_ahead_of > 0;
  return out;
}

/// What would change the step, if the window is open to it.
void change_the_step(SmallRank& rank, double lr) {
  rank.runtime().set_learning_rate(0, lr);
  rank.runtime().zero_grad();
}

void expect_refused(SmallRank& rank) {
  Runtime& runtime = rank.runtime();
  EXPECT_THAT(thrown_by([&] { runtime.set_learning_rate(0, 0.25); }),
              testing::HasSubstr("after a failure of, the last backward() of a step, and the "
                                 "step's updates may have started"));
  EXPECT_THROW(runtime.zero_grad(), UserError);
  EXPECT_THROW(runtime.begin_backward(true), UserError);
}

struct Ended {
  std::vector<SmallRank::Bits> values;
  std::uint64_t early = 0;
  bool operator==(const Ended&) const = default;
};

/// Five steps of two micro-batches; before the last of each comes what `fails` does.
Ended train(const SmallRank::Options& options, const std::function<void(SmallRank&)>& fails) {
  SmallRank rank(options, comm::make_solo_world());
  rank.attach();
  for (int step = 0; step < 5; ++step) {
    rank.backward(2 * step, false);
    fails(rank);
    rank.backward(2 * step + 1);
    rank.step();
  }
  rank.runtime().finish();
  return {rank.values(), rank.runtime().stats().updates.early};
}

// In the first step, too, which would learn a habit from it.
TEST(FailedPass, IsAsIfItHadNotBegunWhereNoGradientCame) {
  for (const double clip : {0.0, 1e9}) {
    const SmallRank::Options options = small_model(clip);
    const Ended undisturbed = train(options, [](SmallRank&) {});
    EXPECT_EQ(undisturbed.early, 4 * options.pages.size());
    const Ended disturbed = train(options, [](SmallRank& rank) {
      for (int times = 0; times < 2; ++times) {
        rank.runtime().begin_backward(true);
        rank.runtime().backward_failed();
      }
    });
    EXPECT_EQ(disturbed, undisturbed) << clip;
  }
}

TEST(FailedPass, LeavesTheStepToBeChangedWhereNoGradientCame) {
  int failures = 0;
  const auto run = [&](bool fails) {
    double lr = 0.5;
    return train(small_model(), [&, lr](SmallRank& rank) mutable {
      if (fails) {
        rank.runtime().begin_backward(true);
        rank.runtime().backward_failed();
        ++failures;
      }
      EXPECT_NO_THROW(change_the_step(rank, lr /= 2));
    });
  };
  EXPECT_EQ(run(true), run(false));
  EXPECT_EQ(failures, 5);
}

// step() completes with what has come, as ever.
TEST(FailedPass, KeepsTheWindowWhereAGradientCame) {
  std::vector<std::vector<SmallRank::Bits>> seen;
  for (const bool fails : {false, true}) {
    SmallRank rank(small_model(), comm::make_solo_world());
    rank.attach();
    rank.backward(0);
    rank.step();
    rank.runtime().begin_backward(true);
    rank.contribute(2, 1);
    if (fails) {
      rank.runtime().backward_failed();
      expect_refused(rank);
    } else {
      rank.runtime().end_backward();
    }
    rank.step();
    EXPECT_NO_THROW(change_the_step(rank, 0.25));
    rank.backward(2);
    rank.step();
    seen.push_back(rank.values());
  }
  EXPECT_EQ(seen[0], seen[1]);
}

TEST(FailedPass, KeepsTheWindowWhereAGradientMayStillCome) {
  SmallRank rank(small_model(), comm::make_solo_world());
  rank.attach();
  rank.backward(0);
  rank.step();
  rank.runtime().begin_backward(true);
  rank.runtime().backward_failed(/*over=*/false);
  expect_refused(rank);
  rank.step();
  EXPECT_NO_THROW(change_the_step(rank, 0.25));
}

// What is written under a pin of the window is undone, which must be an error when it is found.
TEST(FailedPass, KeepsTheWindowOfAPin) {
  SmallRank rank(small_model(), comm::make_solo_world());
  rank.attach();
  rank.backward(0);
  rank.step();
  rank.runtime().begin_backward(true);
  EXPECT_EQ(rank.runtime().raw_writes(rank.page(1)), pager::RawWrites::Refuse);
  rank.runtime().backward_failed();
  expect_refused(rank);
  rank.step();
}

// Where all ranks refuse the same they take the same steps.
TEST(FailedPass, KeepsTheWindowOfSeveralRanks) {
  const auto ended = run_ranks(2, [](auto world) {
    SmallRank rank(small_model(), std::move(world));
    rank.attach();
    rank.backward(0);
    rank.step();
    if (rank.rank() == 0) {
      rank.runtime().begin_backward(true);
      rank.runtime().backward_failed();
    } else {
      rank.backward(1);
    }
    EXPECT_THROW(rank.runtime().set_learning_rate(0, 0.25), UserError);
    EXPECT_THROW(rank.runtime().zero_grad(), UserError);
    EXPECT_THROW(rank.runtime().begin_backward(true), UserError);
    rank.step();
    rank.runtime().set_learning_rate(0, 0.25);
    rank.backward(2);
    rank.step();
    rank.release();
  });
  EXPECT_THAT(ended, testing::Each(std::string()));
}

}  // namespace
}  // namespace pagoda::engine

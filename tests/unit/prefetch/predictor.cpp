// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/predictor.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace pagoda::prefetch {
namespace {

using Touches = std::vector<Touch>;

/// Drives a predictor on a clock of its own, one microsecond a touch.
class Player {
 public:
  explicit Player(const Predictor::Options& options = {}) : predictor_(options) {}

  void play(const Touches& touches) {
    for (const Touch touch : touches) predictor_.touch(touch, now_ += 1000);
  }
  /// Touches that were not foreseen.
  std::uint64_t surprises(const Touches& touches) {
    const auto before = predictor_.stats();
    play(touches);
    const auto after = predictor_.stats();
    return after.misses + after.unknown - before.misses - before.unknown;
  }
  Predictor& predictor() { return predictor_; }
  Nanos& now() { return now_; }

 private:
  Predictor predictor_;
  Nanos now_ = 0;
};

/// Pages first, first+1, … in one mode.
Touches run_of(PageId first, PageId count, std::uint8_t mode) {
  Touches touches;
  for (PageId page = 0; page < count; ++page) touches.push_back({first + page, mode});
  return touches;
}

Touches operator+(Touches a, const Touches& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Touches times(const Touches& touches, int count) {
  Touches all;
  for (int i = 0; i < count; ++i) all = std::move(all) + touches;
  return all;
}

Touches forward_and_backward(PageId pages) {
  Touches touches = run_of(0, pages, 1);
  for (PageId page = pages; page-- > 0;) touches.push_back({page, 3});
  return touches;
}

TEST(Predictor, KnowsNothingAtFirst) {
  Predictor predictor;
  predictor.touch({3, 0}, 0);
  EXPECT_EQ(predictor.size(), 0U);
  EXPECT_EQ(predictor.stats().unknown, 1U);
  EXPECT_FALSE(predictor.next_use(3));
  EXPECT_EQ(predictor.last_use(3), 0U);
  EXPECT_FALSE(predictor.last_use(4));
}

TEST(Predictor, ForeseesAPeriodAfterOne) {
  Player player;
  const Touches period = forward_and_backward(50);
  player.play(period);
  EXPECT_LE(player.surprises(period), 1U) << "only that it starts again";
  EXPECT_EQ(player.surprises(times(period, 3)), 0U);
  EXPECT_EQ(player.predictor().size(), 4096U);
  for (std::size_t i = 0; i < 4096; ++i) {
    ASSERT_EQ(player.predictor().ahead(i).touch, period[i % period.size()]) << i;
  }
}

TEST(Predictor, NextUseIsTheFirstOfThem) {
  Player player;
  const Touches period = forward_and_backward(10);
  player.play(times(period, 3));
  player.play({period[0]});
  EXPECT_EQ(player.predictor().next_use(1), 1U);
  EXPECT_EQ(player.predictor().next_use(9), 9U);
  EXPECT_EQ(player.predictor().next_use(0), 19U);
  EXPECT_EQ(player.predictor().last_use(0), 0U);
  EXPECT_EQ(player.predictor().last_use(9), 10U);
}

TEST(Predictor, RepeatsAreOneTouch) {
  Player player;
  const Touches period = {{1, 0}, {1, 0}, {1, 1}, {2, 0}, {2, 0}, {2, 0}};
  player.play(times(period, 10));
  EXPECT_EQ(player.predictor().stats().hits + player.predictor().stats().misses +
                player.predictor().stats().unknown,
            30U);
  EXPECT_EQ(player.predictor().ahead(1).touch, (Touch{1, 1}));
}

TEST(Predictor, TimesAreTheMeasuredOnesWithoutStalls) {
  Predictor predictor;
  Nanos now = 0;
  for (int pass = 0; pass < 20; ++pass) {
    for (PageId page = 0; page < 4; ++page) {
      predictor.touch({page, 0}, now);
      now += 1000 * (page + 1);
      if (page == 2) {
        predictor.stalled(500'000);
        now += 500'000;
      }
    }
  }
  // The current touch is of page 3: 4 µs until page 0, then 1 until page 1, and so on.
  EXPECT_EQ(predictor.ahead(0).in, 4000);
  EXPECT_EQ(predictor.ahead(1).in, 5000);
  EXPECT_EQ(predictor.ahead(2).in, 7000);
  EXPECT_EQ(predictor.ahead(3).in, 10'000);
}

TEST(Predictor, OnePauseDoesNotLookLikeASlowOperator) {
  Player player;
  const Touches period = run_of(0, 10, 0);
  player.play(times(period, 5));
  player.now() += 60'000'000'000;
  player.play(period);
  EXPECT_LT(player.predictor().ahead(99).in, 200'000) << "made before the pause";
  player.play({{77, 0}, {0, 0}});  // a surprise: what comes is made anew
  ASSERT_EQ(player.predictor().ahead(9).touch, (Touch{0, 0}));
  EXPECT_LT(player.predictor().ahead(9).in, 1'000'000) << "made after it";
}

TEST(Predictor, TimesFollowAProgramThatBecomesFaster) {
  Player player;
  const Touches period = run_of(0, 100, 0);
  for (int pass = 0; pass < 3; ++pass) {
    for (const Touch touch : period) player.predictor().touch(touch, player.now() += 20'000);
  }
  EXPECT_EQ(player.predictor().ahead(49).in, 50 * 20'000);
  player.play(times(period, 4));
  EXPECT_LT(player.predictor().ahead(49).in, 60'000);
  EXPECT_GT(player.predictor().ahead(49).in, 45'000);
}

TEST(Predictor, PhasesAreKnownAgainAtOnce) {
  Player player;
  const Touches train = forward_and_backward(40);
  const Touches generate = run_of(5, 30, 0);
  player.play(times(train, 4));
  EXPECT_GE(player.surprises(generate), 30U);
  player.play(times(generate, 2000));
  EXPECT_LE(player.surprises(times(train, 2)), 2U);
  EXPECT_LE(player.surprises(times(generate, 2)), 2U);
  // One touch of a known phase is enough to see far.
  player.play(times(train, 2));
  player.play({generate[0]});
  for (std::size_t i = 1; i < generate.size(); ++i) {
    ASSERT_EQ(player.predictor().ahead(i - 1).touch, generate[i]) << i;
  }
}

TEST(Predictor, LoopsAreCounted) {
  // Three pages of a shared layer, 200 times, longer than most contexts.
  Player player;
  const Touches period = run_of(10, 20, 1) + times(run_of(0, 3, 1), 200) + run_of(30, 20, 1);
  player.play(times(period, 6));
  EXPECT_EQ(player.surprises(times(period, 3)), 0U);
  EXPECT_EQ(player.predictor().next_use(30), 621U) << "the end of the loop is foreseen";
}

TEST(Predictor, ALongSharedLayerIsCounted) {
  // One layer of 12 pages 200 times: 2400 touches.
  Player player;
  const Touches period = run_of(12, 5, 1) + times(run_of(0, 12, 1), 200) + run_of(17, 3, 1);
  player.play(times(period, 5));
  EXPECT_EQ(player.surprises(times(period, 2)), 0U);
}

TEST(Predictor, AOneOffDeviationIsForgiven) {
  Player player;
  const Touches period = forward_and_backward(60);
  player.play(times(period, 10));
  Touches odd = period;
  odd.insert(odd.begin() + 20, Touch{55, 7});
  EXPECT_LE(player.surprises(odd), 2U);
  EXPECT_LE(player.surprises(period), 1U);
  EXPECT_EQ(player.surprises(times(period, 5)), 0U);
}

TEST(Predictor, AfterAnExpertTheRestIsKnown) {
  // Each layer uses one of eight experts, by the data: only that one touch may surprise.
  constexpr PageId kLayers = 30;
  Player player;
  std::mt19937 random(5);
  const auto pass = [&] {
    Touches touches;
    for (PageId layer = 0; layer < kLayers; ++layer) {
      const PageId first = layer * 20;
      touches = std::move(touches) + run_of(first, 4, 0) +
                Touches{{first + 4 + static_cast<PageId>(random() % 8), 0}} +
                run_of(first + 12, 3, 0);
    }
    return touches;
  };
  for (int i = 0; i < 120; ++i) player.play(pass());  // every expert was there
  for (int i = 0; i < 20; ++i) {
    for (const Touch touch : pass()) {
      const bool expert = touch.page % 20 >= 4 && touch.page % 20 < 12;
      const std::uint64_t surprised = player.surprises({touch});
      ASSERT_TRUE(expert || surprised == 0) << "page " << touch.page;
    }
  }
}

TEST(Predictor, AFrequentExpertIsExpected) {
  Player player;
  std::mt19937 random(6);
  std::uint64_t surprised = 0;
  constexpr int kPasses = 2000;
  for (int i = 0; i < kPasses; ++i) {
    const PageId expert = random() % 10 == 0 ? 30 + static_cast<PageId>(random() % 5) : 29;
    const std::uint64_t now = player.surprises(run_of(0, 29, 0) + Touches{{expert, 0}});
    if (i >= kPasses / 2) surprised += now;
  }
  // A tenth cannot be foreseen; each of those may cost one more.
  EXPECT_LT(surprised, kPasses / 2 * 25 / 100);
}

TEST(Predictor, AForgottenPageIsNotExpected) {
  Player player;
  const Touches period = run_of(0, 20, 0);
  player.play(times(period, 3));
  ASSERT_TRUE(player.predictor().next_use(12));
  player.predictor().forget(12);
  EXPECT_FALSE(player.predictor().next_use(12));
  EXPECT_FALSE(player.predictor().last_use(12));
  EXPECT_EQ(player.predictor().size(), 12U) << "what follows it is unknown";
  player.play(run_of(0, 12, 0));
  EXPECT_EQ(player.predictor().size(), 0U);

  // The program goes on without it, and is known after one pass.
  const Touches without = run_of(0, 12, 0) + run_of(13, 7, 0);
  player.play(run_of(13, 7, 0));
  player.play(without);
  EXPECT_EQ(player.surprises(times(without, 3)), 0U);
  EXPECT_FALSE(player.predictor().next_use(12));
}

TEST(Predictor, ANumberThatComesAgainIsAnotherPage) {
  Player player;
  player.play(times(run_of(0, 5, 0), 3));
  player.predictor().forget(4);  // the current page
  player.play({{4, 0}});
  EXPECT_EQ(player.predictor().size(), 0U) << "what followed the old page 4 is not of this one";
  player.predictor().forget(1000);
}

TEST(Predictor, MemoryIsBoundedAndTheConfirmedStays) {
  Predictor::Options options;
  options.max_contexts = 4000;
  options.horizon = 256;
  Player player(options);
  const Touches train = forward_and_backward(40);
  std::mt19937 random(9);
  player.play(times(train, 4));
  for (int round = 0; round < 200; ++round) {
    Touches noise;
    for (int i = 0; i < 100; ++i) noise.push_back({static_cast<PageId>(1000 + random() % 5000), 0});
    player.play(noise);
    ASSERT_LE(player.predictor().stats().contexts, options.max_contexts);
    ASSERT_LE(player.surprises(train), 3U) << "round " << round;
  }
}

TEST(Predictor, NoiseWithoutEndStaysWithinTheBound) {
  Predictor::Options options;
  options.max_contexts = 1000;
  options.horizon = 64;
  Player player(options);
  std::mt19937 random(10);
  for (int i = 0; i < 20'000; ++i) {
    player.play({{static_cast<PageId>(random() % 50), static_cast<std::uint8_t>(random() % 2)}});
    ASSERT_LE(player.predictor().stats().contexts, options.max_contexts);
    ASSERT_LE(player.predictor().size(), options.horizon);
  }
}

}  // namespace
}  // namespace pagoda::prefetch

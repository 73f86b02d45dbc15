// SPDX-License-Identifier: Apache-2.0
// What repeats is foreseen: any period after two of it, and train, eval and generate in whatever
// order and length after each was seen.
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/prefetch/predictor.h"

namespace pagoda::prefetch {
namespace {

using Touches = std::vector<Touch>;

#ifdef __SANITIZE_THREAD__
constexpr int kPeriods = 15;  // values are looked at here, and no thread is
constexpr std::uint32_t kPrograms = 1;
#else
constexpr int kPeriods = 80;
constexpr std::uint32_t kPrograms = 5;
#endif

std::uint64_t surprises(const Predictor& predictor) {
  return predictor.stats().misses + predictor.stats().unknown;
}

/// Touches of random pages; the same page never twice in a row, not even when it is repeated.
Touches random_period(std::mt19937& random, std::size_t length, PageId pages) {
  Touches period;
  while (period.size() < length) {
    const Touch touch{static_cast<PageId>(random() % pages),
                      static_cast<std::uint8_t>(random() % 2)};
    const bool last = period.size() + 1 == length;
    if (!period.empty() && (period.back() == touch || (last && period.front() == touch))) continue;
    period.push_back(touch);
  }
  return period;
}

TEST(PrefetchPrediction, AnyPeriodIsForeseenAfterTwo) {
  std::mt19937 random(1);
  Predictor::Options options;
  options.horizon = 700;
  for (int round = 0; round < kPeriods; ++round) {
    const std::size_t length = 3 + random() % 600;
    const PageId pages = static_cast<PageId>(5 + length / (2 + random() % 20));
    const Touches period = random_period(random, length, pages);
    Predictor predictor(options);
    Nanos now = 0;
    const auto play = [&] {
      for (const Touch touch : period) predictor.touch(touch, now += 1000);
    };
    play();
    play();
    const std::uint64_t before = surprises(predictor);
    play();
    ASSERT_EQ(surprises(predictor) - before, 0U)
        << "round " << round << ", " << length << " touches of " << pages << " pages";
    for (std::size_t i = 0; i < predictor.size(); ++i) {
      ASSERT_EQ(predictor.ahead(i).touch, period[i % length]) << "round " << round << ", " << i;
      ASSERT_EQ(predictor.ahead(i).in, static_cast<Nanos>(1000 * (i + 1)));
    }
    ASSERT_GE(predictor.size(), std::size_t{128});
  }
}

/// A model of some layers that trains (forward, checkpointed backward), evaluates, and generates.
class Program {
 public:
  explicit Program(std::uint32_t seed)
      : random_(seed), layers_(static_cast<PageId>(10 + random_() % 30)) {}

  /// The touches of one phase of random kind and length.
  Touches phase() {
    Touches touches;
    const auto kind = random_() % 3;
    const auto passes = 1 + random_() % 12;
    for (std::size_t pass = 0; pass < passes; ++pass) {
      if (kind == 0) train(touches);
      if (kind == 1) forward(touches, kNone);
      if (kind == 2) generate(touches);
    }
    return touches;
  }

 private:
  enum Mode : std::uint8_t { kNone = 0, kGradients = 1, kBackward = 3 };
  static constexpr PageId kPages = 9;  // of a layer
  static constexpr PageId kEmbedding = 0;

  static void layer(Touches& touches, PageId number, Mode mode) {
    for (PageId page = 0; page < kPages; ++page)
      touches.push_back({1 + number * kPages + page, mode});
  }
  void forward(Touches& touches, Mode mode) const {
    touches.push_back({kEmbedding, mode});
    for (PageId number = 0; number < layers_; ++number) layer(touches, number, mode);
    touches.push_back({kEmbedding, mode});  // tied
  }
  void train(Touches& touches) const {
    forward(touches, kNone);
    for (PageId number = layers_; number-- > 0;) {
      layer(touches, number, kGradients);
      for (PageId page = kPages; page-- > 0;) {
        touches.push_back({1 + number * kPages + page, kBackward});
      }
    }
    touches.push_back({kEmbedding, kBackward});
  }
  /// Leaves a page of each layer out (its result is cached).
  void generate(Touches& touches) const {
    touches.push_back({kEmbedding, kNone});
    for (PageId number = 0; number < layers_; ++number) {
      for (PageId page = 0; page < kPages; ++page) {
        if (page != 4) touches.push_back({1 + number * kPages + page, kNone});
      }
    }
    touches.push_back({kEmbedding, kNone});
  }

  std::mt19937 random_;
  PageId layers_;
};

TEST(PrefetchPrediction, PhasesInAnyOrderStayForeseen) {
  for (std::uint32_t seed = 0; seed < kPrograms; ++seed) {
    Program program(seed);
    Predictor predictor;
    Nanos now = 0;
    for (int phase = 0; phase < 30; ++phase) {
      for (const Touch touch : program.phase()) predictor.touch(touch, now += 1000);
    }
    const auto before = predictor.stats();
    for (int phase = 0; phase < 60; ++phase) {
      for (const Touch touch : program.phase()) predictor.touch(touch, now += 1000);
    }
    const auto after = predictor.stats();
    const auto hits = static_cast<double>(after.hits - before.hits);
    const auto others =
        static_cast<double>(after.misses - before.misses + after.unknown - before.unknown);
    EXPECT_GE(hits / (hits + others), 0.99) << "seed " << seed;
  }
}

}  // namespace
}  // namespace pagoda::prefetch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/fault/fault_plan.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

namespace pagoda::io {
namespace {

class Target final : public Request {
 public:
  Target(Op kind, Bytes at, Bytes size) {
    op = kind;
    offset = at;
    length = size;
  }
  void complete(std::int64_t) noexcept override {}
};

TEST(FaultPlan, ARuleStrikesWhereAndAsOftenAsItSays) {
  FaultPlan plan;
  plan.add({.fault = {.kind = FaultKind::Short},
            .op = Op::Write,
            .begin = 100,
            .end = 200,
            .skip = 1,
            .times = 2});
  EXPECT_FALSE(plan.decide(Target(Op::Read, 100, 10)));
  EXPECT_FALSE(plan.decide(Target(Op::Write, 0, 100)));
  EXPECT_FALSE(plan.decide(Target(Op::Write, 200, 100)));
  EXPECT_FALSE(plan.decide(Target(Op::Write, 150, 1))) << "skipped";
  EXPECT_TRUE(plan.decide(Target(Op::Write, 150, 1)));
  EXPECT_TRUE(plan.decide(Target(Op::Write, 50, 51)));
  EXPECT_FALSE(plan.decide(Target(Op::Write, 150, 1))) << "used up";
  EXPECT_EQ(plan.injected(FaultKind::Short), 2U);
}

TEST(FaultPlan, TheLotteryDependsOnTheSeedAndNotOnTheOrder) {
  const auto draws = [](std::uint64_t seed, bool backwards) {
    FaultPlan plan;
    plan.set_lottery({.seed = seed, .probability = 0.3, .faults = {{.kind = FaultKind::Error}}});
    std::vector<bool> struck(200);
    for (std::size_t i = 0; i < struck.size(); ++i) {
      const std::size_t at = backwards ? struck.size() - 1 - i : i;
      struck[at] = plan.decide(Target(Op::Read, at * 4096, 4096)).has_value();
    }
    return struck;
  };
  EXPECT_EQ(draws(1, false), draws(1, true));
  EXPECT_NE(draws(1, false), draws(2, false));
  const auto struck = draws(1, false);
  const auto hits = std::count(struck.begin(), struck.end(), true);
  EXPECT_GT(hits, 30);
  EXPECT_LT(hits, 100);
}

TEST(FaultPlan, APaceLinesRequestsUpOneAfterTheOther) {
  constexpr Nanos kEach = 4096;  // at a byte a nanosecond
  FaultPlan plan;
  plan.set_pace(1e9);
  plan.add({.fault = {.kind = FaultKind::Error}, .begin = 4096, .end = 8192});
  const Nanos before = now_ns();
  const auto first = plan.decide(Target(Op::Read, 0, 4096));
  const auto struck = plan.decide(Target(Op::Write, 4096, 4096));
  const auto second = plan.decide(Target(Op::Write, 0, 2048));
  ASSERT_TRUE(first && struck && second);
  EXPECT_EQ(struck->kind, FaultKind::Error);
  EXPECT_EQ(first->kind, FaultKind::Delay);
  EXPECT_GE(first->until, before + kEach);
  EXPECT_GE(second->until, first->until + kEach / 2) << "it has to wait for the first";
  EXPECT_EQ(plan.injected(FaultKind::Delay), 0U);
  plan.clear();
  EXPECT_FALSE(plan.decide(Target(Op::Read, 0, 4096)));
}

}  // namespace
}  // namespace pagoda::io

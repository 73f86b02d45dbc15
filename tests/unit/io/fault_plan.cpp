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

}  // namespace
}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/budget.h"

#include <atomic>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace pagoda {
namespace {

using ::testing::HasSubstr;

TEST(Budget, GivesAndTakesBack) {
  Budget host("host", 1000);
  {
    const Reservation a = host.reserve(600, "parameters");
    EXPECT_EQ(a.bytes(), 600U);
    EXPECT_EQ(a.tag(), "parameters");
    EXPECT_EQ(host.used(), 600U);
    EXPECT_EQ(host.available(), 400U);
  }
  EXPECT_EQ(host.used(), 0U);
  EXPECT_EQ(host.peak(), 600U);
  EXPECT_EQ(host.limit(), 1000U);
}

TEST(Budget, IsHardAndNamesTheHoldersLargestFirst) {
  Budget device("device_budget", 8_GiB);
  const Reservation a = device.reserve(1_GiB, "gradients");
  const Reservation b = device.reserve(3_GiB, "optimizer state");
  const Reservation c = device.reserve(2_GiB, "parameters");
  { const Reservation gone = device.reserve(1_GiB, "staging"); }
  try {
    const Reservation d = device.reserve(3_GiB, "activations");
    FAIL() << "a budget was exceeded";
  } catch (const BudgetExceeded& e) {
    EXPECT_THAT(
        e.what(),
        HasSubstr("device_budget = 8 GiB has 2 GiB left, and 3 GiB are needed for activations: "
                  "raise device_budget to at least 9 GiB (held by optimizer "
                  "state 3 GiB, parameters 2 GiB, gradients 1 GiB)"));
    EXPECT_EQ(e.requested(), 3_GiB);
    EXPECT_EQ(e.available(), 2_GiB);
  }
  EXPECT_EQ(device.used(), 6_GiB) << "a refused reservation takes nothing";
  EXPECT_EQ(device.try_reserve(3_GiB, "activations"), std::nullopt);
  EXPECT_TRUE(device.try_reserve(2_GiB, "activations").has_value());
}

TEST(Budget, HugeRequestsDoNotWrapAround) {
  Budget host("host", 100);
  const Reservation a = host.reserve(60, "a");
  EXPECT_THROW((void)host.reserve(~Bytes{0}, "b"), BudgetExceeded);
  EXPECT_THROW((void)host.reserve(~Bytes{0} - 59, "b"), BudgetExceeded);
}

TEST(Budget, KnowsThePeakOfEachTag) {
  Budget host("host", 1000);
  Reservation a = host.reserve(100, "a");
  {
    const Reservation more = host.reserve(300, "a");
    const Reservation b = host.reserve(50, "b");
  }
  EXPECT_EQ(host.peak("a"), 400U);
  EXPECT_EQ(host.peak("b"), 50U);
  EXPECT_EQ(host.peak("never seen"), 0U);
  EXPECT_EQ(host.peak(), 450U);
  const auto holders = host.holders();
  ASSERT_EQ(holders.size(), 2U);
  EXPECT_EQ(holders[0].tag, "a");
  EXPECT_EQ(holders[0].bytes, 100U);
  EXPECT_EQ(holders[1].bytes, 0U);
}

TEST(Reservation, MovesWithoutCountingTwice) {
  Budget host("host", 100);
  Reservation a = host.reserve(40, "a");
  Reservation b = std::move(a);
  EXPECT_EQ(a.bytes(), 0U);  // NOLINT: a moved-from reservation holds nothing, as promised
  EXPECT_EQ(a.tag(), "");
  EXPECT_EQ(host.used(), 40U);
  a = host.reserve(20, "c");
  b = std::move(a);
  EXPECT_EQ(host.used(), 20U) << "assigning over a reservation gives its bytes back";
  b = std::move(b);
  EXPECT_EQ(host.used(), 20U);
  static_assert(!std::is_copy_constructible_v<Reservation>);
}

TEST(Reservation, GrowsShrinksAndSplits) {
  Budget host("host", 100);
  Reservation a = host.reserve(40, "a");
  a.resize(90);
  EXPECT_EQ(host.used(), 90U);
  EXPECT_THROW(a.resize(101), BudgetExceeded);
  EXPECT_EQ(a.bytes(), 90U) << "a refused growth changes nothing";
  a.resize(50);
  Reservation part = a.split(20);
  EXPECT_EQ(host.used(), 50U);
  EXPECT_EQ(part.tag(), "a");
  a.release();
  EXPECT_EQ(host.used(), 20U);
  EXPECT_THROW((void)part.split(21), EngineError);
  Reservation nothing;
  EXPECT_THROW(nothing.resize(1), EngineError);
}

TEST(Reservation, MayOutliveItsBudget) {
  Reservation kept;
  {
    Budget host("host", 100);
    kept = host.reserve(40, "kept");
  }
  EXPECT_EQ(kept.tag(), "kept");
  kept.release();
}

TEST(Budget, NeverOverdrawnByManyThreads) {
  Budget host("host", 1000);
  std::atomic<int> granted{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const std::string tag = t % 2 == 0 ? "even" : "odd";
        for (int i = 0; i < 2000; ++i) {
          if (auto got = host.try_reserve(300, tag)) {
            granted.fetch_add(1);
            got->resize(200);
          }
          EXPECT_LE(host.used(), 1000U);
        }
      });
    }
  }
  EXPECT_GT(granted.load(), 0);
  EXPECT_EQ(host.used(), 0U);
  EXPECT_LE(host.peak(), 1000U);
  EXPECT_LE(host.peak("even"), 1000U);
}

}  // namespace
}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/expected_queue.h"

#include <deque>
#include <random>

#include <gtest/gtest.h>

namespace pagoda::prefetch {
namespace {

TEST(ExpectedQueue, TimesCountFromTheTouchThatHappenedLast) {
  ExpectedQueue queue(4);
  queue.push({1, 0}, 1, 10);
  queue.push({2, 0}, 3, 20);
  EXPECT_EQ(queue.at(1).in, 30);
  EXPECT_EQ(queue.at(1).strength, 3);
  queue.pop();
  EXPECT_EQ(queue.at(0).in, 20);
  queue.pop();
  queue.push({3, 0}, 1, 5);
  EXPECT_EQ(queue.at(0).in, 5);
}

TEST(ExpectedQueue, AtRandomAgreesWithASearch) {
  constexpr std::size_t kHorizon = 37;
  ExpectedQueue queue(kHorizon);
  std::deque<PageId> model;
  std::mt19937 random(11);
  const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  for (int round = 0; round < 50'000; ++round) {
    const std::uint32_t dice = below(100);
    if (dice < 55 && !queue.full()) {
      const PageId page = below(12);
      queue.push({page, 0}, 1, 1);
      model.push_back(page);
    } else if (dice < 97 && !model.empty()) {
      queue.pop();
      model.pop_front();
    } else if (dice == 98) {
      queue.clear();
      model.clear();
    } else if (dice == 99) {
      const std::size_t keep = below(kHorizon);
      queue.truncate(keep);
      if (model.size() > keep) model.resize(keep);
    }
    ASSERT_EQ(queue.size(), model.size());
    for (PageId page = 0; page < 13; ++page) {
      const auto found = std::find(model.begin(), model.end(), page);
      const auto use = queue.next_use(page);
      ASSERT_EQ(use.has_value(), found != model.end()) << page;
      if (use) {
        ASSERT_EQ(*use, static_cast<std::size_t>(found - model.begin()) + 1) << page;
      }
    }
  }
}

}  // namespace
}  // namespace pagoda::prefetch

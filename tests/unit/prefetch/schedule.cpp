// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/schedule.h"

#include <map>
#include <vector>

#include <gtest/gtest.h>

namespace pagoda::prefetch {
namespace {

using pager::Outlook;
using Where = Outlook::Where;

/// An arena of given capacity whose pages are set by hand.
class HandArena : public pager::Occupancy {
 public:
  explicit HandArena(Bytes capacity) : free_(capacity) {}

  void add(PageId page, Bytes bytes) { pages_[page] = {bytes, Where::Absent}; }
  void set(PageId page, Where where) {
    Outlook& state = pages_.at(page);
    if (takes_room(state.where)) free_ += state.bytes;
    if (takes_room(where)) free_ -= state.bytes;
    state.where = where;
    resident_.clear();
    for (const auto& [id, it] : pages_) {
      if (it.where == Where::Resident) resident_.push_back(id);
    }
  }
  void pin(PageId page) { pages_.at(page).in_use = true; }

  Outlook page(PageId page) const override { return pages_.at(page); }
  std::span<const PageId> resident() const override { return resident_; }
  Bytes free() const override { return free_; }
  Bytes evictable() const override {
    Bytes sum = 0;
    for (const auto& [id, it] : pages_) {
      if (it.where == Where::Resident && !it.in_use) sum += it.bytes;
    }
    return sum;
  }
  std::size_t awaiting_update() const override { return 0; }  // a schedule does not ask
  std::uint64_t changes() const override { return 0; }

 private:
  static bool takes_room(Where where) { return where == Where::Moving || where == Where::Resident; }

  Bytes free_;
  std::map<PageId, Outlook> pages_;
  std::vector<PageId> resident_;
};

/// Pages 0 … 9 of 1 MB in turn, a millisecond each; page 9 is the current one.
class ScheduleTest : public testing::Test {
 protected:
  ScheduleTest() {
    for (PageId page = 0; page < 10; ++page) arena_.add(page, 1'000'000);
    for (int i = 0; i < 50; ++i) predictor_.touch({static_cast<PageId>(i % 10), 0}, i * 1'000'000);
  }
  /// A page takes so many milliseconds to fetch, and nothing besides.
  void fetch_takes(double milliseconds) {
    rate_ =
        FetchRate(FetchRate::Options{.latency = 0, .bandwidth = 1e9 / milliseconds, .memory = 8});
  }
  void make_resident(std::initializer_list<PageId> pages) {
    for (const PageId page : pages) arena_.set(page, Where::Resident);
  }

  Predictor predictor_;
  HandArena arena_{4'000'000};
  FetchRate rate_;
  Schedule schedule_{predictor_, arena_, rate_};
};

TEST_F(ScheduleTest, WhatFitsIsFetchedAtOnceInTheOrderOfUse) {
  fetch_takes(0.001);
  EXPECT_EQ(schedule_.next_fetch(), 0U);
  arena_.set(0, Where::Moving);
  EXPECT_EQ(schedule_.next_fetch(), 1U);
  arena_.set(1, Where::Resident);
  EXPECT_EQ(schedule_.next_fetch(), 2U);
}

TEST_F(ScheduleTest, RoomIsMadeOnlyWhenItIsTime) {
  make_resident({0, 7, 8, 9});
  // Page 1 is used 1 ms after the next touch. At half a millisecond a fetch and slack 2 it is time;
  // faster, not: and neither do the pages after it hurry.
  fetch_takes(0.5);
  EXPECT_EQ(schedule_.next_fetch(), 1U);
  fetch_takes(0.3);
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt);
}

TEST_F(ScheduleTest, WhatTheNextTouchUsesIsAlwaysDue) {
  make_resident({6, 7, 8, 9});
  fetch_takes(1e-6);
  EXPECT_EQ(schedule_.next_fetch(), 0U) << "there is no later moment to ask";
}

TEST_F(ScheduleTest, ALargePageBehindMakesTheNextOneUrgent) {
  make_resident({0, 7, 8, 9});
  fetch_takes(0.2);
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt);
  arena_.add(2, 1'900'000);  // used 2 ms after the next touch; both take 0.58 ms
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt);
  fetch_takes(0.4);  // 1.16 ms
  EXPECT_EQ(schedule_.next_fetch(), 1U);
}

TEST_F(ScheduleTest, WhatIsOnItsWayDelaysTheRest) {
  make_resident({0, 7, 8});
  arena_.set(1, Where::Moving);
  fetch_takes(0.3);
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt);
  fetch_takes(0.5);  // page 2 is used 2 ms after the next touch, and is ready after page 1: 1 ms
  EXPECT_EQ(schedule_.next_fetch(), 2U);
}

TEST_F(ScheduleTest, APendingPageHasItsRoomKept) {
  fetch_takes(0.001);
  for (const PageId page : {0U, 1U, 2U, 3U}) arena_.set(page, Where::Pending);
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt) << "page 4 would have to go for page 3";
  arena_.set(3, Where::Absent);
  EXPECT_EQ(schedule_.next_fetch(), 3U) << "the others fit beside it";
  arena_.set(3, Where::Resident);
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt);
  arena_.set(0, Where::Absent);  // updated
  EXPECT_EQ(schedule_.next_fetch(), 0U);
}

TEST_F(ScheduleTest, APendingPageIsPartOfWhatIsDue) {
  make_resident({0, 5, 6, 7});
  arena_.set(1, Where::Pending);
  fetch_takes(0.4);  // page 2 is used 2 ms after the next touch: page 1 and it take 0.8 ms
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt);
  fetch_takes(0.5);
  EXPECT_EQ(schedule_.next_fetch(), 2U);
}

TEST_F(ScheduleTest, NothingNeededSoonerMakesRoom) {
  fetch_takes(100);
  make_resident({0, 1, 2, 3});
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt) << "page 4 comes after all that is there";
  arena_.set(3, Where::Absent);
  make_resident({5});
  EXPECT_EQ(schedule_.next_fetch(), 3U);
  arena_.pin(5);
  EXPECT_EQ(schedule_.next_fetch(), std::nullopt) << "page 5 cannot go";
}

TEST_F(ScheduleTest, VictimsAreTheFurthest) {
  make_resident({1, 5, 7, 8});
  EXPECT_EQ(schedule_.choose_victim(), 8U);
  const std::vector<PageId> excluded{8};
  EXPECT_EQ(schedule_.choose_victim(excluded), 7U);
  arena_.pin(7);
  EXPECT_EQ(schedule_.choose_victim(excluded), 5U);
  arena_.set(5, Where::Moving);
  arena_.set(1, Where::Absent);
  EXPECT_EQ(schedule_.choose_victim(excluded), std::nullopt);
}

TEST_F(ScheduleTest, WithoutAnExpectedUsePagesGoFirst) {
  arena_.add(20, 1000);
  arena_.add(21, 1000);
  make_resident({8, 20, 21});
  predictor_.touch({21, 0}, 60'000'000);
  predictor_.touch({20, 0}, 61'000'000);
  predictor_.touch({0, 0}, 62'000'000);
  ASSERT_EQ(predictor_.next_use(8), 8U);
  ASSERT_FALSE(predictor_.next_use(20));
  ASSERT_FALSE(predictor_.next_use(21));
  EXPECT_EQ(schedule_.choose_victim(), 21U) << "touched before page 20";
}

TEST(Schedule, WithoutAPredictionTheLeastRecentlyUsedGoes) {
  Predictor predictor;
  HandArena arena(1'000'000);
  const FetchRate rate;
  const Schedule schedule(predictor, arena, rate);
  EXPECT_EQ(schedule.choose_victim(), std::nullopt);
  EXPECT_EQ(schedule.next_fetch(), std::nullopt);
  for (PageId page = 0; page < 5; ++page) {
    arena.add(page, 1000);
    arena.set(page, Where::Resident);
    predictor.touch({(page + 3) % 5, 0}, page);  // 3 4 0 1 2
  }
  EXPECT_EQ(schedule.choose_victim(), 3U);
  arena.add(9, 1000);
  arena.set(9, Where::Resident);
  EXPECT_EQ(schedule.choose_victim(), 9U) << "never touched at all";
}

}  // namespace
}  // namespace pagoda::prefetch

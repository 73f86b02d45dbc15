// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/oracle.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

namespace pagoda::prefetch {
namespace {

/// Pages 0 … 9 of 1 MB, touched in turn, a millisecond each; the next touch is that of page 0. All
/// are absent, and there is room for four.
class OracleTest : public testing::Test, public pager::Occupancy {
 protected:
  static constexpr Bytes kPage = 1'000'000;
  using Where = pager::Outlook::Where;

  OracleTest() {
    for (int i = 0; i < 50; ++i) oracle_.touched(static_cast<PageId>(i % 10), 0, i * 1'000'000);
  }

  pager::Outlook page(PageId id) const override { return {kPage, where_[id], false, false}; }
  std::span<const PageId> resident() const override { return {}; }
  Bytes free() const override { return 4 * kPage; }
  Bytes evictable() const override { return 0; }
  std::size_t awaiting_update() const override {
    return static_cast<std::size_t>(std::count(where_.begin(), where_.end(), Where::Pending));
  }
  std::uint64_t changes() const override { return changes_; }

  PageId next_fetch() {
    ++changes_;
    return oracle_.next_fetch(*this);
  }
  void mark_pending(PageId first, PageId last) {
    for (PageId id = first; id <= last; ++id) where_[id] = Where::Pending;
  }
  void updated(PageId id) {
    where_[id] = Where::Absent;
    oracle_.absent(id);
  }

  std::vector<Where> where_ = std::vector(10, Where::Absent);
  std::uint64_t changes_ = 0;
  Oracle oracle_;
};

TEST_F(OracleTest, TheNextPageThatIsAbsentComesFirst) {
  EXPECT_EQ(next_fetch(), 0U);
  where_[0] = Where::Moving;
  EXPECT_EQ(next_fetch(), 1U);
}

// Otherwise it would come, be evicted for those before it when their updates are made, and come a
// second time.
TEST_F(OracleTest, APageDoesNotTakeTheRoomOfThoseBeforeItThatOweAnUpdate) {
  mark_pending(0, 5);
  EXPECT_EQ(next_fetch(), pager::kNoPage);
  updated(0);
  EXPECT_EQ(next_fetch(), 0U);
}

TEST_F(OracleTest, APageThatFitsBesideThemComes) {
  mark_pending(0, 2);
  EXPECT_EQ(next_fetch(), 3U);
}

TEST_F(OracleTest, PagesThatOweAndComeLaterAreInNobodysWay) {
  mark_pending(2, 9);
  EXPECT_EQ(next_fetch(), 0U);
}

}  // namespace
}  // namespace pagoda::prefetch

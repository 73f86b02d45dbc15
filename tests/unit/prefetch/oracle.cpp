// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/oracle.h"

#include <deque>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/pager/page.h"

namespace pagoda::prefetch {
namespace {

/// Pages 0 … 9 of 1 MB, touched in turn, a millisecond each; the next touch is that of page 0. All
/// are absent, and there is room for four.
class OracleTest : public testing::Test {
 protected:
  static constexpr Bytes kPage = 1'000'000;

  OracleTest() {
    for (PageId id = 0; id < 10; ++id) {
      pager::Page& page = records_.emplace_back(id, "page", kPage / 4, 4);
      page.blank = false;
      pages_.push_back(&page);
    }
    for (int i = 0; i < 50; ++i) oracle_.touched(static_cast<PageId>(i % 10), 0, i * 1'000'000);
  }

  PageId next_fetch() {
    std::size_t owing = 0;
    for (const pager::Page& page : records_) owing += page.owes() ? 1 : 0;
    return oracle_.next_fetch({pages_, {}, 4 * kPage, 0, owing, ++changes_});
  }
  void owe(PageId first, PageId last) {
    for (PageId id = first; id <= last; ++id) ++records_[id].wanted;
  }
  void updated(PageId id) {
    ++records_[id].version;
    oracle_.absent(id);
  }

  std::deque<pager::Page> records_;
  std::vector<pager::Page*> pages_;
  std::uint64_t changes_ = 0;
  Oracle oracle_;
};

TEST_F(OracleTest, TheNextPageThatIsAbsentComesFirst) {
  EXPECT_EQ(next_fetch(), 0U);
  records_[0].residency = pager::Residency::Fetching;
  EXPECT_EQ(next_fetch(), 1U);
}

// Otherwise it would come, be evicted for those before it when their updates are made, and come a
// second time.
TEST_F(OracleTest, APageDoesNotTakeTheRoomOfThoseBeforeItThatOweAnUpdate) {
  owe(0, 5);
  EXPECT_EQ(next_fetch(), pager::kNoPage);
  updated(0);
  EXPECT_EQ(next_fetch(), 0U);
}

TEST_F(OracleTest, APageThatFitsBesideThemComes) {
  owe(0, 2);
  EXPECT_EQ(next_fetch(), 3U);
}

TEST_F(OracleTest, PagesThatOweAndComeLaterAreInNobodysWay) {
  owe(2, 9);
  EXPECT_EQ(next_fetch(), 0U);
}

}  // namespace
}  // namespace pagoda::prefetch

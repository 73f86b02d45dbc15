// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/context_table.h"

#include <gtest/gtest.h>

namespace pagoda::prefetch {
namespace {

Followed by_page(PageId page) {
  Followed followed;
  followed.next.page = page;
  return followed;
}

TEST(ContextTable, FindsWhatWasInserted) {
  ContextTable table(1000);
  for (std::uint64_t key = 0; key < 400; ++key) table.insert(key << 32, by_page(PageId(key)));
  for (std::uint64_t key = 0; key < 400; ++key) {
    const Followed* found = table.find(key << 32);
    ASSERT_NE(found, nullptr) << key;
    EXPECT_EQ(found->next.page, key);
  }
  EXPECT_EQ(table.find(5), nullptr);
}

TEST(ContextTable, InsertingAgainReplaces) {
  ContextTable table(1000);
  table.insert(7, by_page(1));
  table.insert(7, by_page(2));
  EXPECT_EQ(table.find(7)->next.page, 2U);
  EXPECT_EQ(table.size(), 1U);
}

TEST(ContextTable, StaysWithinItsLimitAndKeepsWhatIsConfirmed) {
  constexpr std::size_t kLimit = 200;
  ContextTable table(kLimit);
  for (std::uint64_t key = 1; key <= 10'000; ++key) {
    table.insert(key, by_page(PageId(key)));
    if (key > 1) {
      ASSERT_NE(table.confirm(1), nullptr) << "after " << key;
    }
    ASSERT_LE(table.size(), kLimit);
  }
  EXPECT_EQ(table.find(1)->next.page, 1U);
  EXPECT_EQ(table.find(2), nullptr) << "not confirmed for long";
  for (std::uint64_t key = 10'000 - kLimit / 2 + 2; key <= 10'000; ++key) {
    EXPECT_NE(table.find(key), nullptr) << key;
  }
}

TEST(ContextTable, AChangeOfAConfirmedContextStays) {
  ContextTable table(8);
  table.insert(1, by_page(1));
  for (std::uint64_t key = 10; key < 15; ++key) table.insert(key, by_page(0));
  table.confirm(1)->next.page = 99;  // it was in the old generation
  EXPECT_EQ(table.find(1)->next.page, 99U);
}

}  // namespace
}  // namespace pagoda::prefetch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/cut.h"

#include <random>

#include <gtest/gtest.h>

namespace pagoda::io {
namespace {

std::vector<Cut> cut(const Grid& grid, Bytes extent_begin, Bytes extent_end, Bytes begin,
                     Bytes end) {
  std::vector<Cut> cuts;
  cut_range(grid, extent_begin, extent_end, begin, end, cuts);
  return cuts;
}

TEST(Cut, WholeCellsStayWhole) {
  const auto cuts = cut({1_MiB, 64_KiB, 4096}, 0, 4_MiB, 1_MiB, 3_MiB);
  ASSERT_EQ(cuts.size(), 2U);
  EXPECT_EQ(cuts[1].begin, 2_MiB);
  EXPECT_EQ(cuts[1].length(), 1_MiB);
  EXPECT_FALSE(cuts[1].partial());
}

TEST(Cut, OnlyTheEndsAreInPart) {
  const auto cuts = cut({1_MiB, 64_KiB, 4096}, 0, 4_MiB, 100, 1_MiB + 100);
  ASSERT_EQ(cuts.size(), 3U);
  EXPECT_EQ(cuts[0].end, 64_KiB);
  EXPECT_EQ(cuts[0].cover_begin, 0U);
  EXPECT_FALSE(cuts[1].partial());
  EXPECT_EQ(cuts[2].cover_end, 1_MiB + 64_KiB);
}

TEST(Cut, AnUnalignedEndOfTheExtentIsItsOwnCut) {
  const auto cuts = cut({1_MiB, 64_KiB, 4096}, 0, 200'000, 0, 200'000);
  ASSERT_EQ(cuts.size(), 2U);
  EXPECT_EQ(cuts[1].begin, 192_KiB);
  EXPECT_EQ(cuts[1].end, 200'000U);
  EXPECT_FALSE(cuts[1].partial()) << "nothing beyond the extent's end has to be kept";
}

TEST(Cut, PropertiesAtRandom) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20'000; ++i) {
    Grid grid{64_KiB, 0, 0};
    grid.align = random() % 2 == 0 ? 4096 : 1;
    grid.block = random() % 2 == 0 ? 16_KiB : grid.align;
    const Bytes extent_begin = random() % 64 * 4096;
    const Bytes extent_end = extent_begin + 1 + random() % 300'000;
    const Bytes begin = extent_begin + random() % (extent_end - extent_begin);
    const Bytes end = begin + 1 + random() % (extent_end - begin);
    Bytes at = begin;
    for (const Cut& each : cut(grid, extent_begin, extent_end, begin, end)) {
      ASSERT_EQ(each.begin, at) << "no gaps";
      ASSERT_GT(each.end, each.begin);
      ASSERT_LE(each.cover_begin, each.begin);
      ASSERT_GE(each.cover_end, each.end);
      ASSERT_GE(each.cover_begin, extent_begin);
      ASSERT_LE(each.cover_end, extent_end);
      ASSERT_EQ(each.cover_begin / grid.cell, (each.cover_end - 1) / grid.cell) << "one cell";
      ASSERT_EQ(each.cover_begin % grid.align, 0U);
      ASSERT_TRUE(each.cover_begin % grid.block == 0 || each.cover_begin == extent_begin);
      ASSERT_TRUE(each.cover_end % grid.block == 0 || each.cover_end == extent_end);
      at = each.end;
    }
    ASSERT_EQ(at, end);
  }
}

}  // namespace
}  // namespace pagoda::io

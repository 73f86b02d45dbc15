// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/block_sums.h"

#include <gtest/gtest.h>

namespace pagoda::io {
namespace {

TEST(BlockSums, BlocksLieOnTheSpacesGrid) {
  // [60 KiB, 200 KiB): the end of block 0, block 1, block 2 and the start of block 3.
  BlockSums sums(60_KiB, 140_KiB, 64_KiB);
  EXPECT_EQ(sums.bytes(), 4U * 9U);
  EXPECT_EQ(sums.index(60_KiB), 0U);
  EXPECT_EQ(sums.index(64_KiB), 1U);
  EXPECT_EQ(sums.index(200_KiB - 1), 3U);
}

TEST(BlockSums, RemembersWhatIsKnown) {
  BlockSums sums(0, 128_KiB, 64_KiB);
  EXPECT_EQ(sums.state(1), BlockState::Unwritten);
  sums.set_written(1, 42);
  EXPECT_EQ(sums.state(1), BlockState::Written);
  EXPECT_EQ(sums.sum(1), 42U);
  EXPECT_EQ(sums.state(0), BlockState::Unwritten);
  sums.set_lost(1);
  EXPECT_EQ(sums.state(1), BlockState::Lost);
}

TEST(BlockSums, NoneTakeNoMemory) {
  EXPECT_FALSE(BlockSums().enabled());
  EXPECT_EQ(BlockSums().bytes(), 0U);
  EXPECT_EQ(BlockSums(4096, 0, 64_KiB).bytes(), 0U);
}

}  // namespace
}  // namespace pagoda::io

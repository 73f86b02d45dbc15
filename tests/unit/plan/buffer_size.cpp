// SPDX-License-Identifier: Apache-2.0
#include "pagoda/plan/buffer_size.h"

#include <gtest/gtest.h>

namespace pagoda::plan {
namespace {

constexpr BufferRange kRange{64_KiB, 4_MiB};

TEST(BufferSize, IsTheLargestWhereThereIsPlenty) {
  EXPECT_EQ(buffer_size(~Bytes{0}, 6, kRange), 4_MiB);
  EXPECT_EQ(buffer_size(8 * 6 * 4_MiB, 6, kRange), 4_MiB);
}

TEST(BufferSize, FollowsTheBudgetUpAndDown) {
  EXPECT_EQ(buffer_size(8 * 6 * 4_MiB - 8, 6, kRange), 2_MiB);
  Bytes before = 0;
  for (Bytes budget = 0; budget < 512_MiB; budget += 100'003) {
    const Bytes size = buffer_size(budget, 6, kRange);
    EXPECT_GE(size, before) << budget;
    EXPECT_TRUE(is_power_of_two(size)) << budget;
    if (size > kRange.least) {
      EXPECT_LE(6 * size, budget / kBufferShare) << budget;
    }
    before = size;
  }
}

TEST(BufferSize, IsNeverLessThanTheLeast) {
  EXPECT_EQ(buffer_size(0, 1000, kRange), 64_KiB);
}

}  // namespace
}  // namespace pagoda::plan

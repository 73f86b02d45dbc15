// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/sharding.h"

#include <gtest/gtest.h>

namespace pagoda::pager {
namespace {

TEST(Sharding, CutsEveryPageOnceInRankOrder) {
  for (const int ranks : {1, 2, 3, 7}) {
    for (const std::uint64_t elements : {0UL, 1UL, 4095UL, 4096UL, 4097UL, 100'000UL}) {
      const Sharding sharding{ranks};
      std::uint64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Range range = sharding.of(elements, rank);
        EXPECT_EQ(range.begin, next);
        EXPECT_TRUE(range.begin % Sharding::kBlock == 0 || range.empty());
        next = range.end;
      }
      EXPECT_EQ(next, elements) << ranks;
    }
  }
}

}  // namespace
}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/stripe_map.h"

#include <vector>

#include <gtest/gtest.h>

namespace pagoda::io {
namespace {

TEST(StripeMap, GoesRoundTheFiles) {
  const StripeMap map(3, 100);
  EXPECT_EQ(map.place(0).file, 0U);
  EXPECT_EQ(map.place(199).file, 1U);
  EXPECT_EQ(map.place(199).offset, 99U);
  EXPECT_EQ(map.place(310).file, 0U);
  EXPECT_EQ(map.place(310).offset, 110U);
}

TEST(StripeMap, EveryByteHasItsOwnPlaceAndTheFilesAreJustLargeEnough) {
  for (const unsigned files : {1U, 2U, 3U}) {
    for (const Bytes capacity : {0U, 1U, 9U, 10U, 25U, 60U, 61U}) {
      const StripeMap map(files, 10);
      std::vector<std::vector<bool>> taken(files);
      for (unsigned i = 0; i < files; ++i) taken[i].resize(map.file_size(i, capacity));
      for (Bytes position = 0; position < capacity; ++position) {
        const auto [file, offset] = map.place(position);
        ASSERT_LT(offset, taken[file].size());
        ASSERT_FALSE(taken[file][offset]);
        taken[file][offset] = true;
      }
      Bytes sum = 0;
      for (const auto& file : taken) sum += file.size();
      ASSERT_EQ(sum, capacity);
    }
  }
}

}  // namespace
}  // namespace pagoda::io

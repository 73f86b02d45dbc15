// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/nearest_word.h"

#include <gtest/gtest.h>

namespace pagoda {
namespace {

TEST(NearestWord, DistanceCountsLetters) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("clip", "clip"), 0U);
  EXPECT_EQ(edit_distance("clap", "clip"), 1U);
  EXPECT_EQ(edit_distance("clpi", "clip"), 1U) << "neighbours exchanged";
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("sitting", "kitten"), 3U);
}

TEST(NearestWord, IsTheNearestOrNone) {
  const std::vector<std::string> words = {"device", "direct", "clip"};
  EXPECT_EQ(nearest_word("devise", words), "device");
  EXPECT_EQ(nearest_word("dirct", words), "direct");
  EXPECT_EQ(nearest_word("cli", words), "clip");
  EXPECT_EQ(nearest_word("wholly", words), std::nullopt);
  EXPECT_EQ(nearest_word("", words), std::nullopt);
}

}  // namespace
}  // namespace pagoda

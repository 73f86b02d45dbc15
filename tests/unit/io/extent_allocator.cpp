// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/extent_allocator.h"

#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace pagoda::io {
namespace {

TEST(ExtentAllocator, TakesTheSmallestHoleThatFits) {
  ExtentAllocator space(1_MiB);
  const auto a = space.allocate(100_KiB);
  const auto b = space.allocate(4_KiB);
  const auto c = space.allocate(20_KiB);
  const auto d = space.allocate(4_KiB);
  ASSERT_TRUE(a && b && c && d);
  space.free(*a, 100_KiB);
  space.free(*c, 20_KiB);
  EXPECT_EQ(space.allocate(18_KiB), c) << "not the larger hole before it";
}

TEST(ExtentAllocator, MergesHoles) {
  ExtentAllocator space(12_KiB);
  const auto a = space.allocate(1);
  const auto b = space.allocate(4096);
  const auto c = space.allocate(4095);
  EXPECT_FALSE(space.allocate(1));
  space.free(*a, 1);
  space.free(*c, 4095);
  EXPECT_FALSE(space.allocate(8_KiB));
  space.free(*b, 4096);
  EXPECT_EQ(space.stats().holes, 1U);
  EXPECT_EQ(space.allocate(12_KiB), 0U);
}

TEST(ExtentAllocator, NothingAndTooMuch) {
  ExtentAllocator space(8_KiB);
  EXPECT_TRUE(space.allocate(0));
  EXPECT_FALSE(space.allocate(~Bytes{0}));
  EXPECT_EQ(space.stats().used, 0U);
}

TEST(ExtentAllocator, ReturningTwiceIsFound) {
  ExtentAllocator space(64_KiB);
  const auto a = space.allocate(4_KiB);
  static_cast<void>(space.allocate(4_KiB));
  space.free(*a, 4_KiB);
  EXPECT_THROW(space.free(*a, 4_KiB), EngineError);
}

TEST(ExtentAllocator, LargeRangesLieOnWholeBlocksAndNothingIsLostForIt) {
  const std::vector<Bytes> lengths = {5_MiB, 24_KiB, 6_MiB + 1, 4_KiB, 4_MiB, 60_KiB, 9_MiB};
  Bytes all = 0;
  for (const Bytes length : lengths) all += ExtentAllocator::rounded(length);
  EXPECT_EQ(all, 24_MiB + 64_KiB + 88_KiB);
  ExtentAllocator space(all);
  for (const Bytes length : lengths) {
    const auto offset = space.allocate(length);
    ASSERT_TRUE(offset) << length;
    if (length >= ExtentAllocator::kLarge) {
      EXPECT_EQ(*offset % ExtentAllocator::kLargeAlignment, 0U);
    }
  }
  EXPECT_EQ(space.stats().used, all);
}

TEST(ExtentAllocator, ALargeRangeLiesUnalignedBeforeItLiesNowhere) {
  ExtentAllocator space(5_MiB);
  for (Bytes taken = 0; taken < 5_MiB; taken += 4_KiB) ASSERT_TRUE(space.allocate(4_KiB));
  for (Bytes at = 4_KiB; at < 4_KiB + 4_MiB; at += 4_KiB) space.free(at, 4_KiB);
  EXPECT_EQ(space.allocate(4_MiB), 4_KiB);
}

TEST(ExtentAllocator, AtRandomNothingOverlaps) {
  ExtentAllocator space(64_MiB);
  std::map<Bytes, Bytes> held;
  std::mt19937_64 random(3);
  Bytes used = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (held.empty() || random() % 2 == 0) {
      const Bytes length = 1 + random() % (random() % 8 == 0 ? 6_MiB : 100'000);
      const auto offset = space.allocate(length);
      if (!offset) {
        ASSERT_LT(space.stats().largest_hole, ExtentAllocator::rounded(length));
        continue;
      }
      const auto after = held.lower_bound(*offset);
      ASSERT_TRUE(after == held.end() || *offset + length <= after->first);
      if (after != held.begin()) {
        const auto before = std::prev(after);
        ASSERT_LE(before->first + before->second, *offset);
      }
      held.emplace(*offset, length);
      used += ExtentAllocator::rounded(length);
    } else {
      auto victim = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      space.free(victim->first, victim->second);
      used -= ExtentAllocator::rounded(victim->second);
      held.erase(victim);
    }
    ASSERT_EQ(space.stats().used, used);
  }
  for (const auto& [offset, length] : held) space.free(offset, length);
  EXPECT_EQ(space.stats().largest_hole, 64_MiB);
}

}  // namespace
}  // namespace pagoda::io

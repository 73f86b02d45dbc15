// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/master_split.h"

#include <gtest/gtest.h>

namespace pagoda::kernels {
namespace {

constexpr bool survives(std::uint32_t bits) {
  return join_master(split_master(bits)) == bits;
}

// The cases of the proof in docs/notes/numerics.md, at compile time.
static_assert(survives(0x00000000) && survives(0x80000000));  // zeros
static_assert(survives(0x3F800001) && survives(0x3F80FFFF));  // below and above half
static_assert(survives(0x3F808000) && survives(0x3F818000));  // both ties of 0x3F80 … 0x3F82
static_assert(survives(0x7F7F8000) && survives(0x7F7FFFFF));  // rounds to infinity
static_assert(survives(0x7F800000) && survives(0xFF800000));
static_assert(survives(0x7F800001) && survives(0x7FFFFFFF) && survives(0xFFBFFFFF));  // NaN

TEST(MasterSplit, BothMastersOfATieShareParamAndRest) {
  const SplitMaster below = split_master(0x3F818000);  // half-way, rounds up to even
  const SplitMaster above = split_master(0x3F828000);  // half-way, rounds down to even
  EXPECT_EQ(below.param.bits, 0x3F82);
  EXPECT_EQ(above.param.bits, 0x3F82);
  EXPECT_EQ(below.rest, above.rest);
  EXPECT_TRUE(below.tie);
  EXPECT_FALSE(above.tie);
}

TEST(MasterSplit, TheParameterOfANanIsAQuietNan) {
  const SplitMaster split = split_master(0x7F800001);
  EXPECT_EQ(split.param.bits, 0x7FC0);
  EXPECT_TRUE(split.tie);
}

TEST(MasterSplit, SplittingKeepsTheSizeOfTheVariance) {
  const float master[2] = {1.00390625F * 1.5F, 2.0F};
  Bf16 param[2];
  std::int16_t rest[2];
  float variance[2] = {0.25F, -0.5F};  // a stale sign goes
  split_masters(master, param, rest, variance, 2);
  EXPECT_EQ(std::abs(variance[0]), 0.25F);
  EXPECT_EQ(variance[1], 0.5F);
}

}  // namespace
}  // namespace pagoda::kernels

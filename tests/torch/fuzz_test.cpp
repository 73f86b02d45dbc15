// SPDX-License-Identifier: Apache-2.0
// Random programs give the bits of plain tensors. PAGODA_TEST_SEED runs one seed alone, and
// PAGODA_TEST_SEEDS another number of them.
#include "torch/fuzz.h"

#include <cstdlib>

#include <gtest/gtest.h>

namespace zoo {
namespace {

TEST(Fuzz, RandomProgramsGiveTheSameBits) {
  const char* one = std::getenv("PAGODA_TEST_SEED");
  if (one != nullptr) {
    EXPECT_EQ(fuzz(std::strtoull(one, nullptr, 10)), "");
    return;
  }
  const char* many = std::getenv("PAGODA_TEST_SEEDS");
  const std::uint64_t seeds = many != nullptr ? std::strtoull(many, nullptr, 10) : 100;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    EXPECT_EQ(fuzz(seed), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace zoo

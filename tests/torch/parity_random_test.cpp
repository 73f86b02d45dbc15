// SPDX-License-Identifier: Apache-2.0
// More of parity_test.cpp: combinations drawn at random. Every run draws the same ones, unless
// PAGODA_TEST_SEED says otherwise.
#include <cstdlib>
#include <random>

#include <gtest/gtest.h>

#include "torch/parity_case.h"

namespace zoo {
namespace {

covering::Combination draw(std::mt19937_64& random) {
  const auto& dimensions = parity_dimensions();
  for (;;) {
    covering::Combination out(dimensions);
    for (std::size_t d = 0; d < dimensions.size(); ++d) {
      out.set(d, random() % dimensions[d].values.size());
    }
    if (parity_allowed(out)) return out;
  }
}

TEST(ParityAtRandom, OfManyCombinations) {
  constexpr int kCases = 300;
  const char* seed = std::getenv("PAGODA_TEST_SEED");
  std::mt19937_64 random(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1);
  for (int i = 0; i < kCases; ++i) {
    const covering::Combination combination = draw(random);
    const std::string wrong = check_parity(parity_case(combination));
    EXPECT_EQ(wrong, "") << combination.text();
  }
}

}  // namespace
}  // namespace zoo

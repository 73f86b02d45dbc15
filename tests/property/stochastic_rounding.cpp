// SPDX-License-Identifier: Apache-2.0
// The promise: bf16 moments are rounded without bias, by noise that depends on seed, step and index
// only. (That the bits do not depend on sharding or instruction set is in kernel_bits.cpp.)
#include <array>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/kernels/adam.h"
#include "pagoda/kernels/rounding_counter.h"
#include "property/kernel_reference.h"

namespace pagoda {
namespace {

using kernels::Bf16;
using kernels::RoundingKey;

double widened(Bf16 x) {
  return reference::value(reference::from_bf16(x.bits));
}

/// One step on `count` equal elements with bf16 moments that start at zero.
struct Rounded {
  Rounded(std::size_t count, float gradient, std::uint64_t seed, std::uint64_t step)
      : momentum(count), variance(count) {
    std::vector<float> grad(count, gradient), master(count, 1.0F);
    kernels::OptimizerShard shard;
    shard.count = count;
    shard.grad = grad.data();
    shard.master = master.data();
    shard.momentum = momentum.data();
    shard.variance = variance.data();
    kernels::adam_step({}, {step, 1, seed}, shard);
  }
  std::vector<Bf16> momentum, variance;
};

TEST(StochasticRounding, MeanIsTheUnroundedValue) {
  constexpr std::size_t kCount = 1 << 20;
  for (const float gradient : {0.3F, -0.7F, 1.2345e-3F, 5.6e7F, 3.3e-30F}) {
    const Rounded rounded(kCount, gradient, 42, 7);
    const auto check = [&](const std::vector<Bf16>& got, double exact) {
      double sum = 0;
      double low = INFINITY;
      double high = -INFINITY;
      for (const Bf16 x : got) {
        sum += widened(x);
        low = std::min(low, widened(x));
        high = std::max(high, widened(x));
      }
      if (exact == 0) {
        EXPECT_EQ(high, 0);
        return;
      }
      // One of the two neighbours, and both occur; five standard deviations of the mean at most.
      EXPECT_LE(low, exact);
      EXPECT_GE(high, exact);
      EXPECT_LE(high - low, std::fabs(exact) / 127);
      const double deviation = 0.5 * (high - low) / std::sqrt(double{kCount});
      EXPECT_NEAR(sum / kCount, exact, 5 * deviation) << gradient;
    };
    const float rest1 = static_cast<float>(1 - 0.9);
    const float rest2 = static_cast<float>(1 - 0.999);
    check(rounded.momentum, rest1 * gradient);
    check(rounded.variance, rest2 * (gradient * gradient));
  }
}

TEST(StochasticRounding, SmallChangesAddUp) {
  // A second moment that shrinks by 0.1 % a step: round-to-nearest would never move it.
  constexpr std::size_t kCount = 4096;
  std::vector<float> grad(kCount, 0.0F), master(kCount, 1.0F);
  std::vector<Bf16> momentum(kCount), variance(kCount, Bf16{0x3F80});
  kernels::OptimizerShard shard;
  shard.count = kCount;
  shard.grad = grad.data();
  shard.master = master.data();
  shard.momentum = momentum.data();
  shard.variance = variance.data();
  for (std::uint64_t step = 1; step <= 500; ++step) kernels::adam_step({}, {step, 1, 9}, shard);
  double mean = 0;
  for (const Bf16 v : variance) mean += widened(v) / kCount;
  EXPECT_NEAR(mean, std::pow(0.999, 500), 0.005);
}

TEST(StochasticRounding, SeedStepAndIndexAllMatterAndNothingElse) {
  const Rounded base(5000, 0.3F, 42, 7);
  const auto same = [&](const Rounded& other) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < 5000; ++i) {
      count += base.momentum[i].bits == other.momentum[i].bits ? 1 : 0;
    }
    return count;
  };
  EXPECT_EQ(same(Rounded(5000, 0.3F, 42, 7)), 5000U);
  EXPECT_LT(same(Rounded(5000, 0.3F, 43, 7)), 4000U);
  EXPECT_LT(same(Rounded(5000, 0.3F, 42, 8)), 4000U);
}

/// Chi-squared over 256 cells: below 350 with a probability of 1 − 10⁻⁴.
double chi_squared(const std::vector<std::uint32_t>& words, int shift) {
  std::array<double, 256> cells{};
  for (const std::uint32_t word : words) cells[(word >> shift) & 255] += 1;
  const double expected = static_cast<double>(words.size()) / 256;
  double sum = 0;
  for (const double cell : cells) sum += (cell - expected) * (cell - expected) / expected;
  return sum;
}

TEST(StochasticRounding, NoiseIsUniformAndUncorrelated) {
  constexpr std::uint32_t kCount = 1 << 16;
  for (const std::uint64_t step : {1U, 2U, 1000U}) {
    const RoundingKey key = kernels::rounding_key(1, step, 0);
    const RoundingKey next = kernels::rounding_key(1, step + 1, 0);
    std::vector<std::uint32_t> words, along, across, halves;
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const std::uint32_t word = kernels::rounding_bits(key, i);
      words.push_back(word);
      along.push_back(word ^ kernels::rounding_bits(key, i + 1));
      across.push_back(word ^ kernels::rounding_bits(next, i));
      halves.push_back(word ^ (word >> 16));
    }
    for (const int shift : {0, 8, 16, 24}) {
      EXPECT_LT(chi_squared(words, shift), 350) << step;
      EXPECT_LT(chi_squared(along, shift), 350) << step;
      EXPECT_LT(chi_squared(across, shift), 350) << step;
    }
    EXPECT_LT(chi_squared(halves, 0), 350) << step;
    EXPECT_LT(chi_squared(halves, 8), 350) << step;
  }
}

}  // namespace
}  // namespace pagoda

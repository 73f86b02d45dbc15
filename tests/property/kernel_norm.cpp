// SPDX-License-Identifier: Apache-2.0
// The promise: a sum of squares has the same bits on every instruction set, thread count and
// sharding at block boundaries, and a gradient with an infinity or a NaN is always seen.
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/gradient_norm.h"
#include "property/optimizer_state.h"

namespace pagoda {
namespace {

using kernels::Bf16;
using kernels::ConstElements;
using kernels::Fp16;
using kernels::Isa;
using kernels::kNormBlock;

/// The definition: 32 sums, element j to sum j mod 32, then halves added on halves.
double plain_block(const float* values, std::size_t count, double scale) {
  double sums[32] = {};
  for (std::size_t j = 0; j < count; ++j) {
    const double x = values[j];
    sums[j % 32] += x * x;
  }
  for (std::size_t half = 16; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0] * (scale * scale);
}

std::vector<float> gradient(std::size_t count) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 1e-2F);
  std::vector<float> out(count);
  for (float& x : out) x = random() % 64 == 0 ? normal(random) * 1e30F : normal(random);
  return out;
}

/// The same values in each type, with their fp32 meaning.
struct Typed {
  explicit Typed(std::vector<float> from) : fp32(std::move(from)) {
    const std::size_t n = fp32.size();
    bf16.resize(n);
    fp16.resize(n);
    bf16_as_fp32.resize(n);
    fp16_as_fp32.resize(n);
    kernels::cast(fp32.data(), bf16.data(), n);
    kernels::cast(fp32.data(), fp16.data(), n);
    for (std::size_t i = 0; i < n; ++i) {
      if ((fp16[i].bits & 0x7C00) == 0x7C00) fp16[i].bits = 0x7BFF;  // keep it finite
    }
    kernels::cast(bf16.data(), bf16_as_fp32.data(), n);
    kernels::cast(fp16.data(), fp16_as_fp32.data(), n);
  }
  std::vector<std::pair<ConstElements, const float*>> arrays() const {
    return {{fp32.data(), fp32.data()},
            {bf16.data(), bf16_as_fp32.data()},
            {fp16.data(), fp16_as_fp32.data()}};
  }
  std::vector<float> fp32;
  std::vector<Bf16> bf16;
  std::vector<Fp16> fp16;
  std::vector<float> bf16_as_fp32, fp16_as_fp32;
};

TEST(KernelNorm, BlocksAreThoseOfAPlainLoop) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{31}, std::size_t{4096},
                                  std::size_t{4097}, 5 * kNormBlock + 77}) {
    const Typed typed(gradient(count));
    for (const double scale : {1.0, 1.0 / 1024, 0.3}) {
      for (const auto& [array, plain] : typed.arrays()) {
        for (const Isa isa : kernels::supported_isas()) {
          std::vector<double> blocks(kernels::norm_blocks(count));
          kernels::block_sums_of_squares(array, count, scale, blocks, isa);
          double total = 0;
          for (std::size_t b = 0; b < blocks.size(); ++b) {
            const std::size_t n = std::min(kNormBlock, count - b * kNormBlock);
            ASSERT_EQ(blocks[b], plain_block(plain + b * kNormBlock, n, scale))
                << kernels::isa_name(isa) << " block " << b;
            total += blocks[b];
          }
          EXPECT_EQ(kernels::sum_of_squares(array, count, scale, isa), total);
        }
      }
    }
  }
}

TEST(KernelNorm, ShardsAndThreadsDoNotChangeTheSum) {
  const std::size_t count = 40 * kNormBlock + 123;
  const Typed typed(gradient(count));
  ThreadPool pool(3, "norm");
  for (const auto& [array, plain] : typed.arrays()) {
    const double whole = kernels::sum_of_squares(array, count);
    std::vector<double> blocks(kernels::norm_blocks(count));
    kernels::block_sums_of_squares(array, count, 1, blocks, pool);
    EXPECT_EQ(kernels::add_in_order(blocks), whole);
    for (const std::size_t ranks : {2U, 3U, 7U}) {
      double total = 0;
      const std::size_t share = kernels::norm_blocks(count) / ranks + 1;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const std::size_t begin = std::min(count, rank * share * kNormBlock);
        const std::size_t end = std::min(count, begin + share * kNormBlock);
        std::vector<double> part(kernels::norm_blocks(end - begin));
        kernels::block_sums_of_squares(array.from(begin), end - begin, 1, part);
        total = kernels::add_in_order(part, total);
      }
      EXPECT_EQ(total, whole) << ranks;
    }
  }
}

TEST(KernelNorm, OneInfinityOrNanIsSeenWhereverItIs) {
  ThreadPool pool(2, "finite");
  for (const std::size_t count : {std::size_t{1}, std::size_t{70}, std::size_t{4096 * 3 + 5}}) {
    Typed typed(gradient(count));
    for (const auto& [array, plain] : typed.arrays()) {
      for (const Isa isa : kernels::supported_isas()) {
        EXPECT_TRUE(kernels::all_finite(array, count, isa));
      }
    }
    for (std::size_t at = 0; at < count; at += 1 + at / 3) {
      for (const std::uint32_t bad : {0x7F800000U, 0xFF800000U, 0x7FC00000U, 0xFF800001U}) {
        Typed broken = typed;
        std::memcpy(&broken.fp32[at], &bad, 4);
        broken.bf16[at].bits = reference::to_bf16(bad);
        broken.fp16[at].bits = reference::to_fp16(bad);
        for (const auto& [array, plain] : broken.arrays()) {
          for (const Isa isa : kernels::supported_isas()) {
            EXPECT_FALSE(kernels::all_finite(array, count, isa)) << at;
            const double sum = kernels::sum_of_squares(array, count, 1, isa);
            EXPECT_FALSE(std::isfinite(sum)) << at;
          }
          EXPECT_FALSE(kernels::all_finite(array, count, pool)) << at;
        }
      }
    }
  }
}

}  // namespace
}  // namespace pagoda

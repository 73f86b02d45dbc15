// SPDX-License-Identifier: Apache-2.0
// The promise: casts and the split master are exact functions of the bits, the same on every
// instruction set. A dense sample; kernel_exhaustive.cpp takes every pattern.
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/master_split.h"
#include "property/optimizer_state.h"

namespace pagoda {
namespace {

using kernels::Bf16;
using kernels::Elements;
using kernels::Fp16;
using kernels::Isa;

/// Every upper half with lower halves around the places where rounding changes, all fp16
/// boundaries, and random patterns.
std::vector<std::uint32_t> dense_sample() {
  std::vector<std::uint32_t> out;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low :
         {0x0000U, 0x0001U, 0x1000U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      out.push_back((high << 16) | low);
    }
  }
  for (std::uint32_t half = 0; half < 0x10000; ++half) {  // half-way between neighbours of fp16
    const std::uint32_t exact = reference::from_fp16(static_cast<std::uint16_t>(half));
    for (const std::uint32_t offset : {0x0FFFU, 0x1000U, 0x1001U}) out.push_back(exact + offset);
  }
  std::mt19937 random(3);
  for (int i = 0; i < 100000; ++i) out.push_back(static_cast<std::uint32_t>(random()));
  return out;
}

template <class Half, class Expect>
void expect_narrowing(Expect expect) {
  const std::vector<std::uint32_t> sample = dense_sample();
  std::vector<float> from(sample.size());
  std::memcpy(from.data(), sample.data(), sample.size() * 4);
  for (const Isa isa : kernels::supported_isas()) {
    std::vector<Half> to(sample.size());
    kernels::cast(from.data(), to.data(), sample.size(), isa);
    for (std::size_t i = 0; i < sample.size(); ++i) {
      ASSERT_EQ(to[i].bits, expect(sample[i]))
          << fmt::format("{:08x} on {}", sample[i], kernels::isa_name(isa));
    }
  }
}

template <class Half, class Expect>
void expect_widening(Expect expect) {
  std::vector<Half> from(0x10000);
  for (std::uint32_t i = 0; i < 0x10000; ++i) from[i].bits = static_cast<std::uint16_t>(i);
  for (const Isa isa : kernels::supported_isas()) {
    std::vector<float> to(from.size());
    kernels::cast(from.data(), to.data(), from.size(), isa);
    for (std::uint32_t i = 0; i < 0x10000; ++i) {
      std::uint32_t got = 0;
      std::memcpy(&got, &to[i], 4);
      ASSERT_EQ(got, expect(static_cast<std::uint16_t>(i)))
          << fmt::format("{:04x} on {}", i, kernels::isa_name(isa));
    }
  }
}

TEST(KernelCasts, NarrowToBf16) {
  expect_narrowing<Bf16>(reference::to_bf16);
}
TEST(KernelCasts, NarrowToFp16) {
  expect_narrowing<Fp16>(reference::to_fp16);
}
TEST(KernelCasts, WidenAllBf16) {
  expect_widening<Bf16>(reference::from_bf16);
}
TEST(KernelCasts, WidenAllFp16) {
  expect_widening<Fp16>(reference::from_fp16);
}

TEST(KernelCasts, BetweenHalvesGoesThroughFp32) {
  std::vector<Bf16> from(0x10000);
  for (std::uint32_t i = 0; i < 0x10000; ++i) from[i].bits = static_cast<std::uint16_t>(i);
  for (const Isa isa : kernels::supported_isas()) {
    std::vector<Fp16> to(from.size());
    kernels::cast(from.data(), to.data(), from.size(), isa);
    for (std::uint32_t i = 0; i < 0x10000; ++i) {
      const auto half = static_cast<std::uint16_t>(i);
      ASSERT_EQ(to[i].bits, reference::to_fp16(reference::from_bf16(half))) << i;
    }
  }
}

TEST(KernelCasts, AnyCutAndAlignmentGivesTheSameBits) {
  const std::vector<std::uint32_t> sample = dense_sample();
  ThreadPool pool(3, "casts");
  for (const std::size_t shift : {0U, 1U, 31U}) {
    std::vector<float> from(sample.size());
    std::memcpy(from.data(), sample.data(), sample.size() * 4);
    std::vector<Bf16> whole(sample.size() + shift), cut(sample.size() + shift);
    kernels::cast(from.data(), whole.data() + shift, from.size(), kernels::best_isa());
    kernels::cast(from.data(), cut.data() + shift, from.size(), pool);
    EXPECT_EQ(std::memcmp(whole.data(), cut.data(), whole.size() * 2), 0);
    for (std::size_t i = 0; i < from.size(); i += 1 + i % 97) {
      const std::size_t n = std::min<std::size_t>(1 + i % 97, from.size() - i);
      kernels::cast(from.data() + i, cut.data() + shift + i, n);
    }
    EXPECT_EQ(std::memcmp(whole.data(), cut.data(), whole.size() * 2), 0);
  }
}

TEST(KernelCasts, SplittingAMasterLosesNothing) {
  const std::vector<std::uint32_t> sample = dense_sample();
  const std::size_t n = sample.size();
  std::vector<float> master(n), joined(n);
  std::memcpy(master.data(), sample.data(), n * 4);
  for (const Isa isa : kernels::supported_isas()) {
    for (const bool small : {false, true}) {
      std::vector<Bf16> param(n);
      std::vector<std::int16_t> rest(n);
      std::vector<float> variance(n, 0.25F);
      std::vector<Bf16> small_variance(n, Bf16{0x3E80});
      const Elements v = small ? Elements(small_variance.data()) : Elements(variance.data());
      kernels::split_masters(master.data(), param.data(), rest.data(), v, n, isa);
      kernels::join_masters(param.data(), rest.data(), v, joined.data(), n, isa);
      ASSERT_EQ(std::memcmp(master.data(), joined.data(), n * 4), 0) << kernels::isa_name(isa);
      for (std::size_t i = 0; i < n; ++i) {
        const kernels::SplitMaster one = kernels::split_master(sample[i]);
        ASSERT_EQ(param[i].bits, reference::to_bf16(sample[i])) << i;
        ASSERT_EQ(param[i].bits, one.param.bits);
        ASSERT_EQ(rest[i], one.rest);
        const std::uint32_t stored =
            small ? small_variance[i].bits << 16 : reference::bits(variance[i]);
        ASSERT_EQ(stored, one.tie ? 0xBE800000U : 0x3E800000U);
        ASSERT_EQ(kernels::join_master(one), sample[i]);
      }
    }
  }
}

}  // namespace
}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
// Every fp32 pattern, all 2³²: narrowing to bf16 and fp16, and the split master there and back, on
// every instruction set.
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "property/kernel_reference.h"
#include <gtest/gtest.h>

#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/master_split.h"

namespace pagoda {
namespace {

using kernels::Bf16;
using kernels::Fp16;

constexpr std::size_t kChunk = 1 << 16;
constexpr std::size_t kChunks = (std::size_t{1} << 32) / kChunk;

/// Runs fn(patterns, first) for all chunks on all cores; fn returns the first pattern that is
/// wrong, or a number beyond all.
void for_all_patterns(
    const std::function<std::uint64_t(const std::vector<float>&, std::uint32_t)>& fn) {
  std::atomic<std::size_t> next{0};
  std::atomic<std::uint64_t> wrong{std::uint64_t{1} << 32};
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < std::max(1U, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      std::vector<float> patterns(kChunk);
      for (std::size_t chunk; (chunk = next++) < kChunks && wrong >> 32 != 0;) {
        const auto first = static_cast<std::uint32_t>(chunk * kChunk);
        auto* bits = reinterpret_cast<std::uint32_t*>(patterns.data());
        for (std::uint32_t i = 0; i < kChunk; ++i) bits[i] = first + i;
        const std::uint64_t found = fn(patterns, first);
        if (found >> 32 == 0) wrong = found;
      }
    });
  }
  threads.clear();
  EXPECT_EQ(wrong.load() >> 32, 1U) << std::hex << wrong.load();
}

constexpr std::uint64_t kNone = std::uint64_t{1} << 32;

template <class Half, class Expect>
std::uint64_t check_narrowing(const std::vector<float>& patterns, std::uint32_t first,
                              Expect expect) {
  std::vector<Half> got(kChunk);
  for (const kernels::Isa isa : kernels::supported_isas()) {
    kernels::cast(patterns.data(), got.data(), kChunk, isa);
    for (std::uint32_t i = 0; i < kChunk; ++i) {
      if (got[i].bits != expect(first + i)) return first + i;
    }
  }
  return kNone;
}

TEST(KernelExhaustive, NarrowToBf16) {
  for_all_patterns([](const std::vector<float>& patterns, std::uint32_t first) {
    return check_narrowing<Bf16>(patterns, first, reference::to_bf16);
  });
}

TEST(KernelExhaustive, NarrowToFp16) {
  for_all_patterns([](const std::vector<float>& patterns, std::uint32_t first) {
    std::vector<std::uint16_t> expected(kChunk);
    for (std::uint32_t i = 0; i < kChunk; ++i) expected[i] = reference::to_fp16(first + i);
    return check_narrowing<Fp16>(patterns, first,
                                 [&](std::uint32_t x) { return expected[x - first]; });
  });
}

TEST(KernelExhaustive, SplitMasterThereAndBack) {
  for_all_patterns([](const std::vector<float>& patterns, std::uint32_t first) -> std::uint64_t {
    std::vector<Bf16> param(kChunk);
    std::vector<std::int16_t> rest(kChunk);
    std::vector<float> joined(kChunk), variance(kChunk, 1.0F);
    const auto* got = reinterpret_cast<const std::uint32_t*>(joined.data());
    for (const kernels::Isa isa : kernels::supported_isas()) {
      kernels::split_masters(patterns.data(), param.data(), rest.data(), variance.data(), kChunk,
                             isa);
      kernels::join_masters(param.data(), rest.data(), variance.data(), joined.data(), kChunk, isa);
      for (std::uint32_t i = 0; i < kChunk; ++i) {
        if (got[i] != first + i || param[i].bits != reference::to_bf16(first + i)) return first + i;
      }
    }
    for (std::uint32_t i = 0; i < kChunk; ++i) {
      if (kernels::join_master(kernels::split_master(first + i)) != first + i) return first + i;
    }
    return kNone;
  });
}

}  // namespace
}  // namespace pagoda

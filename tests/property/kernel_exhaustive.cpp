// SPDX-License-Identifier: Apache-2.0
// Every fp32 pattern, all 2³²: narrowing to bf16 and fp16, and the split master there and back, on
// every instruction set.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/master_split.h"
#include "property/kernel_reference.h"

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

/// Where two chunks differ, as a pattern; kNone where they do not.
template <class T>
std::uint64_t first_difference(const std::vector<T>& a, const std::vector<T>& b,
                               std::uint32_t first) {
  if (std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0) return kNone;
  std::uint32_t i = 0;
  while (std::memcmp(&a[i], &b[i], sizeof(T)) == 0) ++i;
  return first + i;
}

template <class Half, class Expect>
std::uint64_t check_narrowing(const std::vector<float>& patterns, std::uint32_t first,
                              Expect expect) {
  std::vector<Half> expected(kChunk), got(kChunk);
  for (std::uint32_t i = 0; i < kChunk; ++i) expected[i].bits = expect(first + i);
  for (const kernels::Isa isa : kernels::supported_isas()) {
    kernels::cast(patterns.data(), got.data(), kChunk, isa);
    const std::uint64_t wrong = first_difference(got, expected, first);
    if (wrong != kNone) return wrong;
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
    return check_narrowing<Fp16>(patterns, first, reference::to_fp16);
  });
}

TEST(KernelExhaustive, SplitMasterThereAndBack) {
  for_all_patterns([](const std::vector<float>& patterns, std::uint32_t first) -> std::uint64_t {
    std::vector<Bf16> expected(kChunk), param(kChunk);
    std::vector<std::int16_t> rest(kChunk);
    std::vector<float> joined(kChunk), variance(kChunk, 1.0F);
    for (std::uint32_t i = 0; i < kChunk; ++i) {
      expected[i].bits = reference::to_bf16(first + i);
      if (kernels::join_master(kernels::split_master(first + i)) != first + i) return first + i;
    }
    for (const kernels::Isa isa : kernels::supported_isas()) {
      kernels::split_masters(patterns.data(), param.data(), rest.data(), variance.data(), kChunk,
                             isa);
      kernels::join_masters(param.data(), rest.data(), variance.data(), joined.data(), kChunk, isa);
      const std::uint64_t wrong = std::min(first_difference(param, expected, first),
                                           first_difference(joined, patterns, first));
      if (wrong != kNone) return wrong;
    }
    return kNone;
  });
}

}  // namespace
}  // namespace pagoda

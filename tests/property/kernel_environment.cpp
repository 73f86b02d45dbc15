// SPDX-License-Identifier: Apache-2.0
// The promise: a caller's float environment (flushed denormals, another rounding) changes no bit,
// and is the same after the call.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

#include "pagoda/kernels/adam.h"
#include "pagoda/kernels/cast.h"
#include "pagoda/kernels/gradient_norm.h"
#include "property/optimizer_state.h"

namespace pagoda {
namespace {

constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ
constexpr unsigned kUp = 0x4000;
constexpr unsigned kToZero = 0x6000;
constexpr unsigned kDefault = 0x1F80;

/// Everything that rounds, on numbers of which many are denormal.
struct Results {
  explicit Results(kernels::Isa isa, unsigned mode)
      : state({kernels::Dtype::F16, Layout::Param::F16, Layout::Moments::F32, true}, 5000, 0, 11) {
    constexpr std::size_t kCount = 5000;
    std::vector<float> small(kCount);
    std::vector<double> rising(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      small[i] = reference::value(static_cast<std::uint32_t>(i * 0x4567));
      rising[i] = 1.0 / static_cast<double>(i + 1);
    }
    halves.resize(kCount);
    const kernels::Step step{3, 1.0 / 3, 0};
    _mm_setcsr(kDefault | mode);
    kernels::adam_step({.lr = 0.1, .weight_decay = 0.01}, step, state.shard(0), isa);
    kernels::cast(small.data(), halves.data(), kCount, isa);
    norm = kernels::sum_of_squares(small.data(), kCount, 1.0 / 3, isa);
    sum = kernels::add_in_order(rising);
    after = _mm_getcsr();
    _mm_setcsr(kDefault);
  }

  OptimizerState state;
  std::vector<kernels::Fp16> halves;
  double norm = 0;
  double sum = 0;
  unsigned after = 0;
};

TEST(KernelEnvironment, CallersModeChangesNothing) {
  for (const kernels::Isa isa : kernels::supported_isas()) {
    const Results expected(isa, 0);
    for (const unsigned mode : {kFlush, kUp, kToZero, kFlush | kUp}) {
      const Results got(isa, mode);
      SCOPED_TRACE(fmt::format("{} mode {:x}", kernels::isa_name(isa), mode));
      EXPECT_EQ(got.state.difference(expected.state), "");
      EXPECT_EQ(std::memcmp(got.halves.data(), expected.halves.data(), 2 * got.halves.size()), 0);
      EXPECT_EQ(got.norm, expected.norm);
      EXPECT_EQ(got.sum, expected.sum);
      EXPECT_EQ(got.after, kDefault | mode);
    }
  }
}

}  // namespace
}  // namespace pagoda
#endif

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/isa.h"

#include <algorithm>
#include <cstdlib>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/kernels/cast.h"

namespace pagoda::kernels {
namespace {

TEST(Isa, ScalarRunsEverywhereAndTheBestComesLast) {
  const auto supported = supported_isas();
  ASSERT_FALSE(supported.empty());
  EXPECT_EQ(supported.front(), Isa::Scalar);
  EXPECT_EQ(supported.back(), best_isa());
  EXPECT_TRUE(std::ranges::is_sorted(supported));
}

TEST(Isa, NamesAreReadBack) {
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    const auto isa = static_cast<Isa>(i);
    EXPECT_EQ(parse_isa(isa_name(isa)), isa);
  }
  EXPECT_THROW(parse_isa("avx"), UserError);
  EXPECT_THROW(parse_isa(""), UserError);
}

TEST(Isa, AnUnsupportedOneIsRefused) {
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    const auto isa = static_cast<Isa>(i);
    if (std::ranges::count(supported_isas(), isa) > 0) continue;
    const float from = 1;
    Bf16 to{};
    EXPECT_THROW(cast(&from, &to, 1, isa), UserError);
  }
}

// In a process of their own: the variable is read once.
TEST(IsaDeathTest, EnvironmentChooses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::setenv("PAGODA_ISA", "scalar", 1);
        std::_Exit(active_isa() == Isa::Scalar ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_EXIT(
      {
        ::setenv("PAGODA_ISA", "mmx", 1);
        try {
          active_isa();
        } catch (const UserError&) {
          std::_Exit(0);
        }
        std::_Exit(1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace pagoda::kernels

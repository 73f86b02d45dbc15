// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/float_environment.h"

#include <cfenv>

#include <gtest/gtest.h>

namespace pagoda::kernels {
namespace {

TEST(FloatEnvironment, IsDefaultInsideAndRestoredAfter) {
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  {
    const DefaultFloatEnvironment environment;
#if defined(__x86_64__)
    EXPECT_EQ(_mm_getcsr(), 0x1F80U);
#endif
  }
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(FE_TONEAREST);
}

TEST(FloatEnvironment, LeavesNoExceptionFlagsBehind) {
  std::feclearexcept(FE_ALL_EXCEPT);
  {
    const DefaultFloatEnvironment environment;
    volatile float zero = 0;
    volatile float infinite = 1 / zero;
    static_cast<void>(infinite);
  }
  EXPECT_EQ(std::fetestexcept(FE_DIVBYZERO), 0);
}

}  // namespace
}  // namespace pagoda::kernels

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/clock.h"

#include <gtest/gtest.h>

namespace pagoda {
namespace {

TEST(Clock, NeverGoesBack) {
  Nanos last = now_ns();
  for (int i = 0; i < 1000; ++i) {
    const Nanos now = now_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Clock, SleepNeverReturnsEarly) {
  for (const Nanos wait : {Nanos{-5}, Nanos{0}, Nanos{20'000}, Nanos{400'000}}) {
    const Nanos deadline = now_ns() + wait;
    sleep_until_ns(deadline);
    EXPECT_GE(now_ns(), deadline);
  }
}

TEST(Stopwatch, CountsFromItsStart) {
  Stopwatch watch;
  sleep_until_ns(now_ns() + 1'000'000);
  EXPECT_GE(watch.elapsed_ns(), 1'000'000);
  EXPECT_GE(watch.seconds(), 1e-3);
  const Nanos before = watch.elapsed_ns();
  watch.restart();
  EXPECT_GE(before, 1'000'000);
}

}  // namespace
}  // namespace pagoda

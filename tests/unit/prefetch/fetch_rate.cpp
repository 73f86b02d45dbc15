// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/fetch_rate.h"

#include <random>

#include <gtest/gtest.h>

namespace pagoda::prefetch {
namespace {

TEST(FetchRate, BelievesItsOptionsBeforeTheFirstSample) {
  FetchRate rate(FetchRate::Options{.latency = 1e-3, .bandwidth = 1e9, .memory = 8});
  rate.add(0, 1.0);
  rate.add(100, 0.0);
  EXPECT_DOUBLE_EQ(rate.latency(), 1e-3);
  EXPECT_DOUBLE_EQ(rate.bandwidth(), 1e9);
  EXPECT_DOUBLE_EQ(rate.seconds(2'000'000), 3e-3);
}

TEST(FetchRate, TellsLatencyAndBandwidthApart) {
  FetchRate rate;
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const Bytes bytes = 1 + random() % 64_MiB;
    rate.add(bytes, 2e-3 + static_cast<double>(bytes) / 5e9);
  }
  EXPECT_NEAR(rate.latency(), 2e-3, 1e-6);
  EXPECT_NEAR(rate.bandwidth(), 5e9, 5e6);
}

TEST(FetchRate, EqualSizesGiveABandwidthAlone) {
  FetchRate rate;
  for (int i = 0; i < 50; ++i) rate.add(1_MiB, 1e-3);
  EXPECT_EQ(rate.latency(), 0.0);
  EXPECT_NEAR(rate.seconds(1_MiB), 1e-3, 1e-9);
}

TEST(FetchRate, TimesThatFallWithTheSizeStillGiveSomethingSane) {
  FetchRate rate;
  for (int i = 0; i < 50; ++i) {
    rate.add(1_MiB, 2e-3);
    rate.add(4_MiB, 1e-3);
  }
  EXPECT_GT(rate.bandwidth(), 0.0);
  EXPECT_GE(rate.latency(), 0.0);
  EXPECT_GT(rate.seconds(64_MiB), rate.seconds(1_MiB));
}

TEST(FetchRate, FollowsAChange) {
  FetchRate rate;
  for (int i = 0; i < 300; ++i) rate.add(Bytes(1 + i % 7) * 1_MiB, double(1 + i % 7) * 1e-3);
  for (int i = 0; i < 600; ++i) rate.add(Bytes(1 + i % 7) * 1_MiB, double(1 + i % 7) * 4e-3);
  EXPECT_NEAR(rate.seconds(10_MiB), 40e-3, 1e-3);
}

}  // namespace
}  // namespace pagoda::prefetch

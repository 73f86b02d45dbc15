// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/free_ranges.h"

#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/device/device.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "unit/device/device_case.h"

namespace pagoda::device {
namespace {

TEST(FreeRanges, TakesTheBestFitAndJoinsNeighbours) {
  FreeRanges free;
  free.give({0, 100, {}});
  free.give({200, 50, {}});
  EXPECT_EQ(free.take(40)->offset, 200u);
  EXPECT_EQ(free.total(), 110u);
  EXPECT_EQ(free.largest(), 100u);
  EXPECT_FALSE(free.take(101));
  free.give({100, 100, {}});
  free.give({200, 40, {}});
  EXPECT_EQ(free.count(), 1u);
  EXPECT_EQ(free.largest(), 250u);
  EXPECT_TRUE(free.contains(249));
  EXPECT_FALSE(free.contains(250));
}

TEST(FreeRanges, WhatIsFreeCannotBeGivenAgain) {
  FreeRanges free;
  free.give({100, 100, {}});
  EXPECT_THROW(free.give({100, 100, {}}), EngineError);
  EXPECT_THROW(free.give({150, 10, {}}), EngineError);
  EXPECT_THROW(free.give({50, 60, {}}), EngineError);
  EXPECT_EQ(free.total(), 100u);
}

/// Fences of streams held back at a gate, so that none is over.
class FreeRangesFences : public ::testing::Test {
 protected:
  Fence fence(Stream& stream, Bytes begin, Bytes end) {
    stream.enqueue("work", [] {});
    return {begin, end, stream.mark()};
  }

  std::shared_ptr<Device> device_ = emulated::make_device();
  std::shared_ptr<Stream> a_ = device_->make_stream({.name = "a"});
  std::shared_ptr<Stream> b_ = device_->make_stream({.name = "b"});
  Gate gate_a_{*a_};
  Gate gate_b_{*b_};
};

TEST_F(FreeRangesFences, APieceCarriesTheFencesOfItsBytesOnly) {
  FreeRanges free;
  free.give({0, 100, {fence(*a_, 0, 100)}});
  free.give({100, 100, {fence(*b_, 100, 200)}});
  const auto first = free.take(150);
  ASSERT_EQ(first->fences.size(), 2u);
  const auto second = free.take(50);
  ASSERT_EQ(second->fences.size(), 1u);
  EXPECT_EQ(second->fences[0].mark.stream, b_->id());
  EXPECT_EQ(second->fences[0].begin, 150u);
}

TEST_F(FreeRangesFences, FencesThatAreOverAreDropped) {
  FreeRanges free;
  free.give({0, 100, {fence(*a_, 0, 100)}});
  gate_a_.open();
  a_->synchronize();
  free.give({100, 100, {fence(*b_, 100, 200)}});
  free.give({200, 100, {}});
  const auto range = free.take(300);
  ASSERT_EQ(range->fences.size(), 1u);
  EXPECT_EQ(range->fences[0].mark.stream, b_->id());
}

TEST_F(FreeRangesFences, ALongListIsPutTogetherAsTheLatestOfEachStream) {
  Fences fences;
  std::uint64_t latest = 0;
  for (Bytes i = 0; i < 100; ++i) {
    const Fence next = fence(i % 2 == 0 ? *a_ : *b_, i * 10, i * 10 + 10);
    if (i % 2 == 0) latest = next.mark.position;
    add_fences(fences, {next});
    EXPECT_LE(fences.size(), 16u);
  }
  Bytes begin = ~Bytes{0};
  Bytes end = 0;
  std::uint64_t position = 0;
  for (const Fence& kept : fences) {
    if (kept.mark.stream != a_->id()) continue;
    begin = std::min(begin, kept.begin);
    end = std::max(end, kept.end);
    position = std::max(position, kept.mark.position);
  }
  EXPECT_EQ(begin, 0u);
  EXPECT_EQ(end, 990u);
  EXPECT_EQ(position, latest);
}

}  // namespace
}  // namespace pagoda::device

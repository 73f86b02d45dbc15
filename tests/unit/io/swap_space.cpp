// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/swap_space.h"

#include <cerrno>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/io/io_error.h"
#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

using ::testing::HasSubstr;

class SwapSpaceTest : public ::testing::Test {
 protected:
  SwapOptions options() const {
    return SpaceKind{EngineChoice::Auto, Direct::Auto, true, 2}.options(scratch_, 1_MiB);
  }

  const ScratchDirectory scratch_;
  Budget budget_{"nvme", 2_MiB};
};

TEST_F(SwapSpaceTest, IsTakenFromTheBudget) {
  {
    const SwapSpace space(options(), budget_);
    EXPECT_EQ(budget_.used(), 1_MiB);
    SwapOptions more = options();
    more.capacity = 1_MiB + 1;
    more.directories = {scratch_.path()};
    EXPECT_THROW(SwapSpace(more, budget_), BudgetExceeded);
  }
  EXPECT_EQ(budget_.used(), 0U);
}

TEST_F(SwapSpaceTest, ExtentsGiveTheirSpaceBack) {
  SwapSpace space(options(), budget_);
  Extent all = space.allocate(1_MiB);
  try {
    static_cast<void>(space.allocate(1));
    FAIL() << "no error";
  } catch (const BudgetExceeded& error) {
    EXPECT_THAT(error.what(), HasSubstr("raise nvme_budget to at least"));
    EXPECT_EQ(error.available(), 0U);
  }
  all = Extent();
  EXPECT_EQ(space.stats().space.used, 0U);
  EXPECT_EQ(space.allocate(1_MiB).length(), 1_MiB);
}

TEST_F(SwapSpaceTest, SpaceUnderAWriteIsNotHandedOutAgain) {
  SwapSpace space(options(), budget_);
  const auto bytes = random_bytes(1_MiB, 1);
  Extent extent = space.allocate(1_MiB);
  // The callback runs before the transfer lets go of its extent.
  bool held = false;
  Transfer write = space.write(
      extent, 0, bytes, [&](std::exception_ptr) { held = space.stats().space.used == 1_MiB; });
  extent = Extent();
  write.wait();
  EXPECT_TRUE(held);
  EXPECT_EQ(space.stats().space.used, 0U);
}

TEST_F(SwapSpaceTest, HandlesMayOutliveTheSpace) {
  Extent extent;
  Transfer transfer;
  const auto bytes = random_bytes(100'000, 1);
  {
    SwapSpace space(options(), budget_);
    extent = space.allocate(100'000);
    transfer = space.write(extent, 0, bytes);
  }
  EXPECT_TRUE(transfer.done()) << "the space waits for its transfers";
  transfer.wait();
}

TEST_F(SwapSpaceTest, WrongArgumentsAreTheCallersError) {
  SwapSpace space(options(), budget_);
  SwapSpace other(options(), budget_);
  std::vector<std::byte> memory(100);
  const Extent extent = space.allocate(150);
  EXPECT_THROW(static_cast<void>(space.read(extent, 51, memory)), UserError);
  EXPECT_THROW(static_cast<void>(space.read(extent, ~Bytes{0}, memory)), UserError);
  EXPECT_THROW(static_cast<void>(other.write(extent, 0, memory)), UserError);
  EXPECT_THROW(static_cast<void>(space.write(Extent(), 0, memory)), UserError);
}

TEST_F(SwapSpaceTest, WrongOptionsAreTheCallersError) {
  const auto refused = [&](auto change) {
    SwapOptions changed = options();
    change(changed);
    EXPECT_THROW(SwapSpace(changed, budget_), UserError);
    EXPECT_EQ(budget_.used(), 0U);
  };
  refused([](SwapOptions& o) { o.directories.clear(); });
  refused([](SwapOptions& o) { o.io_bytes = 100'000; });
  refused([](SwapOptions& o) { o.stripe_bytes = o.io_bytes + 4096; });
  refused([](SwapOptions& o) { o.checksum_block = 2 * o.io_bytes; });
  refused([](SwapOptions& o) { o.depth = 0; });
  refused([](SwapOptions& o) { o.rings = 0; });
  refused([](SwapOptions& o) { o.bounce_buffers = 0; });
}

TEST_F(SwapSpaceTest, NothingIsAllowedAndCallsBack) {
  SwapSpace space(options(), budget_);
  const Extent extent = space.allocate(0);
  bool called = false;
  space.write(extent, 0, {}, [&](std::exception_ptr error) { called = error == nullptr; }).wait();
  EXPECT_TRUE(called);
  space.submit({}).wait();
}

TEST_F(SwapSpaceTest, WhatWasNeverWrittenCannotBeRead) {
  SwapSpace space(options(), budget_);
  const Extent extent = space.allocate(100'000);
  std::vector<std::byte> memory(100);
  Transfer read = space.read(extent, 50'000, memory);
  try {
    read.wait();
    FAIL() << "no error";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENODATA);
  }
  // The rest of a block that was written in part is zeros.
  space.write(extent, 50'000, random_bytes(10, 1)).wait();
  space.read(extent, 50'010, memory).wait();
  EXPECT_TRUE(memory == std::vector<std::byte>(100));
  EXPECT_EQ(space.stats().device_bytes_read, 16_KiB) << "the first write had nothing to read";
}

TEST_F(SwapSpaceTest, AlignedWholeTransfersAreNotCopied) {
  SwapSpace space(options(), budget_);
  const Extent extent = space.allocate(512_KiB);
  AlignedBuffer memory(512_KiB);
  const auto bytes = random_bytes(512_KiB, 2);
  std::copy(bytes.begin(), bytes.end(), memory.data());
  space.write(extent, 0, memory.span()).wait();
  space.read(extent, 128_KiB, memory.span().first(64_KiB)).wait();
  const SwapSpace::Stats stats = space.stats();
  EXPECT_EQ(stats.bounced_bytes, 0U);
  EXPECT_EQ(stats.requests, 9U);
  EXPECT_EQ(stats.bytes_written, 512_KiB);
  EXPECT_EQ(stats.device_bytes_written, 512_KiB);
  EXPECT_EQ(stats.bytes_read, 64_KiB);
}

TEST_F(SwapSpaceTest, ChecksumMemoryIsCounted) {
  SwapSpace space(options(), budget_);
  {
    const Extent extent = space.allocate(100'000);
    EXPECT_EQ(space.stats().sum_bytes, 7U * 9U);
    EXPECT_GE(space.sum_bytes(100'000), space.stats().sum_bytes);
  }
  EXPECT_EQ(space.stats().sum_bytes, 0U);
}

TEST_F(SwapSpaceTest, SeveralRingsPerDirectory) {
  SwapOptions two = options();
  two.rings = 2;
  SwapSpace space(two, budget_);
  const Extent extent = space.allocate(1_MiB);
  const auto bytes = random_bytes(1_MiB, 2);
  std::vector<std::byte> read(bytes.size());
  space.write(extent, 0, bytes).wait();
  space.read(extent, 0, read).wait();
  EXPECT_TRUE(read == bytes);
}

}  // namespace
}  // namespace pagoda::io

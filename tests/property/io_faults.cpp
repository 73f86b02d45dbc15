// SPDX-License-Identifier: Apache-2.0
// A fault below the space is either healed or reported with path, offset, length and errno; none
// is lost, and wrong bytes are never handed out.
#include <cerrno>
#include <cstring>
#include <latch>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/io/fault/fault_plan.h"
#include "pagoda/io/io_error.h"
#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

using ::testing::HasSubstr;

class IoFaults : public ::testing::TestWithParam<SpaceKind> {
 protected:
  void SetUp() override { PAGODA_SKIP_WITHOUT_ENGINE(GetParam()); }

  SwapOptions options(Bytes capacity) {
    SwapOptions options = GetParam().options(scratch_, capacity);
    options.faults = plan_;
    return options;
  }

  /// The error that `transfer` ends with must be complete.
  static IoError expect_error(Transfer& transfer, const SwapSpace& space, int error_number) {
    try {
      transfer.wait();
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), error_number) << error.what();
      EXPECT_THAT(space.paths(), ::testing::Contains(error.path()));
      EXPECT_GT(error.length(), 0U);
      EXPECT_THAT(error.what(), HasSubstr(error.path()));
      EXPECT_THAT(error.what(), HasSubstr("offset="));
      return error;
    }
    ADD_FAILURE() << "no error";
    return IoError("none", "", 0, 0, 0);
  }

  const ScratchDirectory scratch_;
  Budget budget_{"nvme", 64_MiB};
  const std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
};

/// What only checksums can find.
class IoFaultsChecked : public IoFaults {};

TEST_P(IoFaults, ErrnoOfReadsAndWritesIsThrownByWait) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(1_MiB);
  std::vector<std::byte> memory = random_bytes(1_MiB, 1);
  const auto kept = memory;
  space.write(extent, 0, memory).wait();

  plan_->add({.fault = {.kind = FaultKind::Error, .error_number = EIO}, .op = Op::Read, .skip = 3});
  Transfer read = space.read(extent, 0, memory);
  expect_error(read, space, EIO);
  EXPECT_EQ(read.error_count(), 1U);
  EXPECT_THROW(read.wait(), IoError) << "an error stays with its transfer";

  plan_->add({.fault = {.kind = FaultKind::Error, .error_number = ENOSPC}, .op = Op::Write});
  Transfer write = space.write(extent, 0, kept);
  expect_error(write, space, ENOSPC);

  // The rest is unharmed: once written again, all is well.
  space.write(extent, 0, kept).wait();
  space.read(extent, 0, memory).wait();
  EXPECT_TRUE(memory == kept);
  EXPECT_EQ(space.stats().errors, 2U);
}

TEST_P(IoFaultsChecked, AFailedWriteLeavesNoBytesToBeReadAsGood) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(64_KiB);
  std::vector<std::byte> memory = random_bytes(64_KiB, 1);
  space.write(extent, 0, memory).wait();
  plan_->add({.fault = {.kind = FaultKind::Error, .error_number = EIO}, .op = Op::Write});
  Transfer write = space.write(extent, 0, memory);
  EXPECT_THROW(write.wait(), IoError);
  Transfer read = space.read(extent, 0, memory);
  EXPECT_THAT(expect_error(read, space, EIO).what(), HasSubstr("lost"));
  Transfer part = space.write(extent, 5, std::span(memory).first(10));
  EXPECT_THAT(expect_error(part, space, EIO).what(), HasSubstr("lost"));
}

TEST_P(IoFaults, ShortTransfersAreContinued) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(500'000);
  const auto written = random_bytes(500'000, 2);
  for (std::uint64_t position : {1U, 4095U, 4096U, 10'000U, 16'384U}) {
    plan_->add({.fault = {.kind = FaultKind::Short, .position = position}, .op = Op::Write});
    plan_->add({.fault = {.kind = FaultKind::Short, .position = position}, .op = Op::Read});
  }
  space.write(extent, 0, written).wait();
  std::vector<std::byte> read(written.size());
  space.read(extent, 0, read).wait();
  EXPECT_TRUE(read == written);
  EXPECT_EQ(plan_->injected(FaultKind::Short), 10U);
  EXPECT_EQ(space.stats().short_transfers, 10U);
}

TEST_P(IoFaults, ADiskThatNeverMovesAnythingIsAnError) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(8192);
  const auto written = random_bytes(8192, 2);
  plan_->add({.fault = {.kind = FaultKind::Error, .error_number = EAGAIN}, .times = 1'000'000});
  Transfer write = space.write(extent, 0, written);
  expect_error(write, space, EAGAIN);
}

TEST_P(IoFaultsChecked, AFlippedBitIsFound) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(300'000);
  const auto written = random_bytes(300'000, 3);
  std::vector<std::byte> read(written.size());
  space.write(extent, 0, written).wait();

  plan_->add({.fault = {.kind = FaultKind::FlipBit, .position = 12'345}, .op = Op::Read});
  Transfer bad_read = space.read(extent, 0, read);
  expect_error(bad_read, space, EBADMSG);
  space.read(extent, 0, read).wait();  // the disk itself is well
  EXPECT_TRUE(read == written);

  plan_->add({.fault = {.kind = FaultKind::FlipBit, .position = 77'777}, .op = Op::Write});
  space.write(extent, 0, written).wait();  // nobody can know yet
  Transfer worse = space.read(extent, 0, read);
  expect_error(worse, space, EBADMSG);
  // Nor may a write of part of the block bless the rest of it.
  plan_->add({.fault = {.kind = FaultKind::FlipBit, .position = 1}, .op = Op::Write});
  space.write(extent, 0, written).wait();
  Transfer partial = space.write(extent, 100, std::span(written).first(10));
  expect_error(partial, space, EBADMSG);
  EXPECT_EQ(space.stats().checksum_errors, 3U);
}

TEST_P(IoFaults, ADelayedCompletionIsWaitedFor) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(300'000);
  const auto written = random_bytes(300'000, 3);
  std::vector<std::byte> read(written.size());
  plan_->add(
      {.fault = {.kind = FaultKind::Delay, .delay = 20'000'000}, .op = Op::Read, .times = 2});
  space.write(extent, 0, written).wait();
  space.read(extent, 0, read).wait();
  EXPECT_TRUE(read == written);
  EXPECT_EQ(plan_->injected(FaultKind::Delay), 2U);
}

TEST_P(IoFaults, ADelayedCompletionWaitsForItsGate) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(300'000);
  const auto written = random_bytes(300'000, 3);
  std::vector<std::byte> read(written.size());
  space.write(extent, 0, written).wait();
  std::latch gate(1);
  plan_->add({.fault = {.kind = FaultKind::Delay, .gate = &gate}, .op = Op::Read});
  Transfer transfer = space.read(extent, 0, read);
  EXPECT_FALSE(transfer.done());
  gate.count_down();
  transfer.wait();
  EXPECT_TRUE(read == written);
}

TEST_P(IoFaults, APacedDiskIsNoQuickerThanItsPace) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(300'000);
  const auto written = random_bytes(300'000, 3);
  std::vector<std::byte> read(written.size());
  plan_->set_pace(30e6);
  const Nanos begin = now_ns();
  space.write(extent, 0, written).wait();
  space.read(extent, 0, read).wait();
  EXPECT_GE(now_ns() - begin, 20'000'000) << "600 kB at 30 MB/s";
  EXPECT_TRUE(read == written);
}

TEST_P(IoFaults, AnErrorNobodyWaitedForIsThrownByTheNextCall) {
  SwapSpace space(options(4_MiB), budget_);
  const Extent extent = space.allocate(8192);
  const auto written = random_bytes(8192, 3);
  plan_->add({.fault = {.kind = FaultKind::Error, .error_number = EIO}, .op = Op::Write});
  { const Transfer dropped = space.write(extent, 0, written); }
  EXPECT_THROW(static_cast<void>(space.allocate(1)), IoError);
  EXPECT_NO_THROW(space.check()) << "thrown once";

  // A callback is somebody: the error is its own.
  plan_->add({.fault = {.kind = FaultKind::Error, .error_number = EIO}, .op = Op::Write});
  std::exception_ptr seen;
  {
    const Transfer dropped = space.write(extent, 0, written, [&](auto error) { seen = error; });
  }
  EXPECT_NE(seen, nullptr);
  EXPECT_NO_THROW(space.check());

  // And what a callback throws is not lost either.
  {
    const Transfer thrown = space.write(extent, 0, written, [](auto) { throw UserError("mine"); });
  }
  EXPECT_THROW(space.check(), UserError);
}

/// Many seeds: whatever happens, a read gives the bytes of the model, or an error was thrown.
TEST_P(IoFaults, AtRandomNothingIsSilent) {
  std::uint64_t struck = 0;
#ifdef __SANITIZE_THREAD__
  constexpr std::uint64_t kSeeds = 4;
#else
  constexpr std::uint64_t kSeeds = 12;
#endif
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SwapSpace space(options(4_MiB), budget_);
    std::vector<Fault> faults = {{.kind = FaultKind::Error, .error_number = EIO},
                                 {.kind = FaultKind::Error, .error_number = ENOSPC},
                                 {.kind = FaultKind::Short},
                                 {.kind = FaultKind::Delay, .delay = 200'000}};
    if (GetParam().checksums) faults.push_back({.kind = FaultKind::FlipBit});
    plan_->set_lottery({.seed = seed, .probability = 0.2, .faults = faults});
    const std::uint64_t before = plan_->injected(FaultKind::Error);
    std::size_t reported = 0;

    constexpr Bytes kLength = 200'000;
    const Extent extent = space.allocate(kLength);
    std::vector<std::byte> model(kLength);
    std::vector<bool> known(kLength, false);  // a failed write leaves its blocks open
    std::mt19937_64 random(seed);
    for (int round = 0; round < 40; ++round) {
      const Bytes offset = random() % kLength;
      const Bytes length = std::min<Bytes>(1 + random() % 60'000, kLength - offset);
      // Its blocks, which lie on the space's grid.
      const Bytes begin = extent.offset();
      const Bytes from = std::max(align_down(begin + offset, 16_KiB), begin) - begin;
      const Bytes to = std::min(align_up(begin + offset + length, 16_KiB) - begin, kLength);
      if (random() % 2 == 0) {
        const auto fresh = random_bytes(length, random());
        Transfer write = space.write(extent, offset, fresh);
        try {
          write.wait();
          std::copy(fresh.begin(), fresh.end(),
                    model.begin() + static_cast<std::ptrdiff_t>(offset));
          std::fill_n(known.begin() + static_cast<std::ptrdiff_t>(offset), length, true);
        } catch (const IoError&) {
          reported += write.error_count();
          std::fill(known.begin() + static_cast<std::ptrdiff_t>(from),
                    known.begin() + static_cast<std::ptrdiff_t>(to), false);
        }
      } else {
        std::vector<std::byte> bytes(length);
        Transfer read = space.read(extent, offset, bytes);
        try {
          read.wait();
          for (Bytes i = 0; i < length; ++i) {
            if (known[offset + i]) {
              ASSERT_EQ(bytes[i], model[offset + i]) << "seed " << seed << " at " << offset + i;
            }
          }
        } catch (const IoError&) {
          reported += read.error_count();
        }
      }
    }
    const std::uint64_t errors = plan_->injected(FaultKind::Error) - before;
    EXPECT_GE(reported, errors) << "seed " << seed << ": every errno was reported";
    EXPECT_EQ(space.stats().errors, reported);
    struck += errors;
    plan_->clear();
  }
  EXPECT_GT(struck, kSeeds);
  EXPECT_GT(plan_->injected(FaultKind::Short), kSeeds);
}

std::vector<SpaceKind> checked_space_kinds() {
  std::vector<SpaceKind> kinds = all_space_kinds();
  std::erase_if(kinds, [](const SpaceKind& kind) { return !kind.checksums; });
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Kinds, IoFaults, ::testing::ValuesIn(all_space_kinds()), space_kind_name);
INSTANTIATE_TEST_SUITE_P(Kinds, IoFaultsChecked, ::testing::ValuesIn(checked_space_kinds()),
                         space_kind_name);

}  // namespace
}  // namespace pagoda::io

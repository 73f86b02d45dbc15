// SPDX-License-Identifier: Apache-2.0
// What is read is what was written last, whatever the engine, the alignment and the number of
// threads: random transfers against a model in memory.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "pagoda/base/aligned_buffer.h"
#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

class IoContents : public ::testing::TestWithParam<SpaceKind> {
 protected:
  void SetUp() override { PAGODA_SKIP_WITHOUT_ENGINE(GetParam()); }

  const ScratchDirectory scratch_;
  Budget budget_{"nvme", 64_MiB};
};

/// Lengths from a byte to many requests, ends aligned now and then.
struct Range {
  Bytes offset;
  Bytes length;
};
Range random_range(std::mt19937_64& random, Bytes limit) {
  const Bytes shift = random() % 19;
  Bytes offset = random() % limit;
  Bytes length = 1 + random() % (Bytes{1} << shift);
  if (random() % 4 == 0) offset = align_down(offset, 4096);
  if (random() % 4 == 0) length = align_up(length, 4096);
  return {offset, std::min(length, limit - offset)};
}

TEST_P(IoContents, ThreadsWithExtentsOfTheirOwn) {
  SwapSpace space(GetParam().options(scratch_, 16_MiB), budget_);
  const auto work = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Bytes length = 700'001 + random() % 300'000;
    const Extent extent = space.allocate(length);
    std::vector<std::byte> model = random_bytes(length, seed);
    AlignedBuffer memory(length + 4096);
    space.write(extent, 0, model).wait();
    for (int round = 0; round < 60; ++round) {
      const Range range = random_range(random, length);
      // Aligned memory goes straight to the disk, other memory through a bounce buffer.
      std::byte* at = memory.data() + (random() % 2 == 0 ? 0 : random() % 4096);
      if (random() % 2 == 0) {
        const auto fresh = random_bytes(range.length, random());
        std::memcpy(at, fresh.data(), fresh.size());
        std::memcpy(model.data() + range.offset, fresh.data(), fresh.size());
        space.write(extent, range.offset, {at, range.length}).wait();
      } else {
        space.read(extent, range.offset, {at, range.length}).wait();
        ASSERT_EQ(std::memcmp(at, model.data() + range.offset, range.length), 0)
            << "offset " << range.offset << " length " << range.length << " seed " << seed;
      }
    }
    std::vector<std::byte> all(length);
    space.read(extent, 0, all).wait();
    ASSERT_TRUE(all == model) << "seed " << seed;
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(space.stats().errors, 0U);
}

TEST_P(IoContents, NeighboursInOneBlockLoseNothing) {
  SwapSpace space(GetParam().options(scratch_, 4_MiB), budget_);
  constexpr Bytes kLength = 50'000;
  const Extent extent = space.allocate(kLength);
  const auto model = random_bytes(kLength, 7);
  if (GetParam().checksums) {  // so that the first reads have something to verify
    space.write(extent, 0, std::vector<std::byte>(kLength)).wait();
  }
  // Every range is written once, by one of four threads, in random order: all share blocks.
  std::vector<Range> ranges;
  std::mt19937_64 random(11);
  for (Bytes at = 0; at < kLength;) {
    const Bytes length = std::min<Bytes>(1 + random() % 700, kLength - at);
    ranges.push_back({at, length});
    at += length;
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < 4; ++first) {
    threads.emplace_back([&, first] {
      std::vector<Transfer> transfers;
      for (std::size_t i = first; i < ranges.size(); i += 4) {
        transfers.push_back(
            space.write(extent, ranges[i].offset,
                        std::span(model).subspan(ranges[i].offset, ranges[i].length)));
      }
      for (Transfer& transfer : transfers) transfer.wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::byte> all(kLength);
  space.read(extent, 0, all).wait();
  EXPECT_TRUE(all == model);
}

TEST_P(IoContents, SharedBlocksKeepTheOrderOfSubmission) {
  SwapSpace space(GetParam().options(scratch_, 4_MiB), budget_);
  constexpr Bytes kLength = 300'003;
  const Extent extent = space.allocate(kLength);
  std::vector<std::byte> model = random_bytes(kLength, 3);
  space.write(extent, 0, model).wait();
  std::mt19937_64 random(5);
  std::vector<std::vector<std::byte>> written;
  std::vector<std::vector<std::byte>> read;
  std::vector<std::vector<std::byte>> expected;
  std::vector<Transfer> transfers;
  for (int i = 0; i < 80; ++i) {  // nobody waits in between
    const Range range = random_range(random, kLength);
    const auto begin = model.begin() + static_cast<std::ptrdiff_t>(range.offset);
    if (random() % 2 == 0) {
      written.push_back(random_bytes(range.length, random()));
      std::copy(written.back().begin(), written.back().end(), begin);
      transfers.push_back(space.write(extent, range.offset, written.back()));
    } else {
      read.emplace_back(range.length);
      expected.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(range.length));
      transfers.push_back(space.read(extent, range.offset, read.back()));
    }
  }
  for (Transfer& transfer : transfers) transfer.wait();
  EXPECT_TRUE(read == expected);
}

TEST_P(IoContents, BatchesAndRegisteredMemory) {
  SwapSpace space(GetParam().options(scratch_, 8_MiB), budget_);
  constexpr Bytes kEach = 200'000;
  constexpr std::size_t kCount = 12;
  AlignedBuffer out(kCount * align_up(kEach, 4096));
  AlignedBuffer in(out.size());
  const auto random = random_bytes(out.size(), 21);
  std::memcpy(out.data(), random.data(), random.size());
  const RegisteredBuffer out_registered = space.register_buffer(out.span());
  RegisteredBuffer in_registered = space.register_buffer(in.span());
  EXPECT_EQ(in_registered.registered(), space.engine_name() == "uring");

  std::vector<Extent> extents;
  std::vector<Move> writes;
  std::vector<Move> reads;
  for (std::size_t i = 0; i < kCount; ++i) extents.push_back(space.allocate(kEach));
  for (std::size_t i = 0; i < kCount; ++i) {
    const Bytes at = i * align_up(kEach, 4096);
    const Priority priority = i % 2 == 0 ? Priority::Urgent : Priority::Background;
    writes.push_back({Op::Write, &extents[i], 0, out.data() + at, kEach, priority});
    reads.push_back({Op::Read, &extents[i], 0, in.data() + at, kEach, priority});
  }
  space.submit(writes).wait();
  space.submit(reads).wait();
  const auto same = [&] {
    for (const Move& move : reads) {
      if (std::memcmp(move.memory, out.data() + (move.memory - in.data()), kEach) != 0)
        return false;
    }
    return true;
  };
  EXPECT_TRUE(same());
  // The same memory, no longer registered.
  in_registered = RegisteredBuffer();
  std::memset(in.data(), 0, in.size());
  space.submit(reads).wait();
  EXPECT_TRUE(same());
}

TEST_P(IoContents, CallbacksMayStartTheNextTransfer) {
  SwapSpace space(GetParam().options(scratch_, 4_MiB), budget_);
  constexpr Bytes kLength = 100'000;
  const Extent extent = space.allocate(kLength);
  const auto first = random_bytes(kLength, 1);
  std::vector<std::byte> second(kLength);
  std::atomic<bool> chained{false};
  Transfer follow_up;
  std::atomic<bool> ready{false};
  Transfer transfer = space.write(extent, 0, first, [&](std::exception_ptr error) {
    EXPECT_EQ(error, nullptr);
    follow_up = space.read(extent, 0, second, [&](std::exception_ptr) { chained = true; });
    ready.store(true, std::memory_order_release);
  });
  transfer.wait();  // the callback has run
  EXPECT_TRUE(ready.load(std::memory_order_acquire));
  follow_up.wait();
  EXPECT_TRUE(chained);
  EXPECT_TRUE(second == first);
}

INSTANTIATE_TEST_SUITE_P(Kinds, IoContents, ::testing::ValuesIn(all_space_kinds()),
                         space_kind_name);

}  // namespace
}  // namespace pagoda::io

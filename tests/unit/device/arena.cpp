// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/arena.h"

#include <thread>

#include <gmock/gmock.h>

#include "pagoda/base/log.h"
#include "unit/device/device_case.h"

namespace pagoda::device {
namespace {

using ::testing::HasSubstr;
using ArenaTest = OnDevice;

template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "nothing was thrown";
}

TEST_P(ArenaTest, BlocksAreAlignedAndApart) {
  std::vector<Block> blocks;
  for (const Bytes bytes : {Bytes{0}, Bytes{1}, Bytes{511}, Bytes{512}, Bytes{513}, 64_KiB + 1}) {
    blocks.push_back(arena_->allocate(bytes, *stream_));
    EXPECT_EQ(blocks.back().size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().data()) % 512, 0u);
    EXPECT_EQ(blocks.back().data(), arena_->data() + blocks.back().offset());
    EXPECT_TRUE(arena_->contains(blocks.back().data()));
  }
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    EXPECT_GE(blocks[i].offset(),
              blocks[i - 1].offset() + std::max<Bytes>(blocks[i - 1].size(), 1));
  }
  EXPECT_FALSE(arena_->contains(arena_->data() + kArena));
}

TEST_P(ArenaTest, BestFitTakesTheSmallestHoleThatIsLargeEnough) {
  std::vector<Block> blocks;  // used and to-be-freed blocks in turns
  for (const Bytes pages : {8, 1, 2, 1, 4, 1, 2, 1}) {
    blocks.push_back(arena_->allocate(pages * 512, *stream_));
  }
  const Bytes two = blocks[2].offset();
  const Bytes four = blocks[4].offset();
  for (const std::size_t i : {0, 2, 4, 6}) blocks[i] = Block();
  EXPECT_EQ(arena_->allocate(2 * 512, *stream_).offset(), two);  // the lower of two equal holes
  EXPECT_EQ(arena_->allocate(3 * 512, *stream_).offset(), four);
}

TEST_P(ArenaTest, FreeNeighboursBecomeOne) {
  std::vector<Block> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(arena_->allocate(kArena / 8, *stream_));
  EXPECT_EQ(arena_->stats().free, 0u);
  EXPECT_EQ(arena_->stats().fragmentation(), 0);
  for (const std::size_t i : {0, 2, 4, 6}) blocks[i] = Block();
  ArenaStats stats = arena_->stats();
  EXPECT_EQ(stats.free_ranges, 4u);
  EXPECT_EQ(stats.largest_free, kArena / 8);
  EXPECT_DOUBLE_EQ(stats.fragmentation(), 0.75);
  blocks.clear();
  stats = arena_->stats();
  EXPECT_EQ(stats.free_ranges, 1u);
  EXPECT_EQ(stats.largest_free, kArena);
  EXPECT_EQ(stats.used, 0u);
  EXPECT_EQ(stats.peak, kArena);
  EXPECT_EQ(stats.allocations, 8u);
}

TEST_P(ArenaTest, FullSaysWhatIsLeft) {
  Block most = arena_->allocate(kArena - 64_KiB, *stream_, "most");
  EXPECT_FALSE(arena_->try_allocate(64_KiB + 1, *stream_));
  EXPECT_FALSE(arena_->try_allocate(~Bytes{0}, *stream_));
  try {
    arena_->allocate(1_MiB, *stream_, "page 7");
    FAIL() << "a block beyond the arena";
  } catch (const ArenaFull& full) {
    EXPECT_EQ(full.requested(), 1_MiB);
    EXPECT_EQ(full.stats().free, 64_KiB);
    for (const char* part : {"device arena", "page 7", "1 MiB", "64 KiB", "4 MiB", "0 %"}) {
      EXPECT_THAT(full.message(), HasSubstr(part));
    }
  }
  EXPECT_EQ(arena_->stats().failures, 3u);
  EXPECT_TRUE(arena_->try_allocate(64_KiB, *stream_));
}

TEST_P(ArenaTest, TheReservationLastsAsLongAsTheMemory) {
  const Bytes before = budget_.used();
  auto arena = std::make_unique<Arena>(device_, budget_.reserve(1_MiB, "extra"));
  EXPECT_EQ(budget_.used(), before + 1_MiB);
  arena.reset();
  EXPECT_EQ(budget_.used(), before);
  EXPECT_THROW(Arena(device_, Reservation()), UserError);
}

TEST_P(ArenaTest, AFreedBlockIsReusedAtOnceAndInOrder) {
  if (!asynchronous()) GTEST_SKIP() << "nothing can be held back on the host device";
  Block source = pinned_ramp(kArena / 4, 1);
  Block first = arena_->allocate(kArena, *stream_, "first user");
  stream_->copy_async(first.data(), source.on(*stream_), kArena / 4, Direction::HostToDevice);
  Gate gate(*stream_);
  Block out = pinned_->allocate(kArena / 4, *stream_, "out");
  stream_->copy_async(out.data(), first.data(), kArena / 4, Direction::DeviceToHost);
  first.free();  // while the copy out of it is still to come
  Block second = arena_->allocate(kArena, *other_, "second user");
  EXPECT_EQ(second.offset(), 0u);
  EXPECT_EQ(arena_->stats().reuse_waits, 1u);
  other_->fill_async(second.data(), std::byte{0xEE}, kArena);
  EXPECT_FALSE(other_->idle());
  gate.open();
  device_->synchronize();
  EXPECT_EQ(std::memcmp(out.data(), source.data(), kArena / 4), 0);
  EXPECT_EQ(download(second.data(), 4, *other_), std::vector(4, std::byte{0xEE}));
}

TEST_P(ArenaTest, TheSameStreamNeedNotWait) {
  Block block = arena_->allocate(kArena, *stream_);
  std::optional<Gate> gate;
  if (asynchronous()) gate.emplace(*stream_);
  stream_->fill_async(block.data(), std::byte{1}, kArena);
  block.free();
  block = arena_->allocate(kArena, *stream_);
  stream_->fill_async(block.data(), std::byte{2}, kArena);
  EXPECT_EQ(arena_->stats().reuse_waits, 0u);
}

TEST_P(ArenaTest, ABlockMayBeFreedUnused) {
  for (int i = 0; i < 10; ++i) {
    Block unused = arena_->allocate(kArena, i % 2 == 0 ? *stream_ : *other_);
  }
}

TEST_P(ArenaTest, EveryStreamThatTouchedABlockIsWaitedFor) {
  const auto event = device_->make_event();
  const auto third = device_->make_stream({.name = "third"});
  Block block = arena_->allocate(kArena, *stream_);
  stream_->fill_async(block.data(), std::byte{1}, kArena);
  stream_->record(*event);
  other_->wait(*event);
  std::optional<Gate> gate;
  if (asynchronous()) gate.emplace(*other_);
  Block out = pinned_->allocate(4096, *other_);
  other_->copy_async(out.data(), block.on(*other_), 4096, Direction::DeviceToHost);
  block.free();
  Block next = arena_->allocate(kArena, *third);
  third->fill_async(next.data(), std::byte{2}, kArena);  // the checker fails if one was forgotten
  if (gate) gate->open();
  third->synchronize();
  EXPECT_EQ(out.data()[0], std::byte{1});
}

TEST_P(ArenaTest, OnlyTheBytesThatAreReusedAreWaitedFor) {
  if (!asynchronous()) GTEST_SKIP() << "nothing can be held back on the host device";
  Block busy = arena_->allocate(kArena / 2, *stream_);
  Block quiet = arena_->allocate(kArena / 4, *other_);
  Block rest = arena_->allocate(kArena / 4, *other_);
  other_->synchronize();
  Gate gate(*stream_);
  rest.free();
  quiet.free();
  busy.free();  // one free range now, of which the first half is in use by the first stream
  const auto third = device_->make_stream({.name = "third"});
  Block lower = arena_->allocate(kArena / 2, *stream_);
  Block upper = arena_->allocate(kArena / 2, *third);
  third->fill_async(upper.data(), std::byte{1}, kArena / 2);
  third->synchronize();  // would hang behind the gate
  EXPECT_FALSE(stream_->idle());
}

TEST_P(ArenaTest, ABlockForTheHostIsSafeAtOnce) {
  Block block = pinned_->allocate(kArena, *stream_);
  std::optional<Gate> gate;
  if (asynchronous()) gate.emplace(*stream_);
  stream_->fill_async(block.data(), std::byte{1}, kArena);
  block.free();
  std::jthread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (gate) gate->open();
  });
  Block mine = pinned_->allocate(kArena, "mine");
  checker_->host_write(mine.data(), kArena, "host");
  std::memset(mine.data(), 2, kArena);
  stream_->synchronize();
  EXPECT_EQ(mine.data()[kArena - 1], std::byte{2});
}

TEST_P(ArenaTest, AFormerUsersFailureIsNotInherited) {
  Block block = arena_->allocate(kArena, *stream_);
  stream_->enqueue("fails", [] { throw EngineError("the kernel failed"); });
  block.free();
  bool ran = false;
  Block next = arena_->allocate(kArena, *other_);
  other_->enqueue("unrelated", [&ran] { ran = true; });
  other_->synchronize();
  EXPECT_TRUE(ran);
  EXPECT_THROW(stream_->synchronize(), EngineError);
}

TEST_P(ArenaTest, FreeingTwiceOrElsewhereIsCaught) {
  Block block = arena_->allocate(4096, *stream_, "mine");
  Block foreign = pinned_->allocate(4096, *stream_, "theirs");
  EXPECT_THAT(message_of([&] { arena_->free(std::move(foreign)); }), HasSubstr("pinned arena"));
  EXPECT_TRUE(foreign) << "a refused block stays with its owner";
  EXPECT_THAT(message_of([&] { arena_->free(foreign.data()); }), HasSubstr("is not in arena"));
  EXPECT_THAT(message_of([&] { arena_->free(block.data() + 512); }), HasSubstr("'mine'"));
  arena_->free(std::move(block));
  EXPECT_THAT(message_of([&] { arena_->free(std::move(block)); }), HasSubstr("freed twice"));
  EXPECT_THAT(message_of([&] { block.free(); }), HasSubstr("freed twice"));
  std::byte* raw = arena_->allocate(4096, *stream_).detach();
  EXPECT_EQ(arena_->stats().blocks, 1u);
  arena_->touch(raw, *other_);
  arena_->free(raw);
  EXPECT_THAT(message_of([&] { arena_->free(raw); }), HasSubstr("freed twice"));
  EXPECT_EQ(arena_->stats().used, 0u);
}

TEST_P(ArenaTest, BlocksInUseWhenTheArenaGoesAreReported) {
  std::vector<LeakedBlock> leaked;
  Block block;
  {
    Arena arena(device_, budget_.reserve(1_MiB, "short-lived"),
                {.on_leak = [&](const auto& blocks) { leaked = blocks; }});
    Block fine = arena.allocate(100, *stream_, "fine");
    block = arena.allocate(5000, *stream_, "kept");
  }
  ASSERT_EQ(leaked.size(), 1u);
  EXPECT_EQ(leaked[0].name, "kept");
  EXPECT_EQ(leaked[0].size, 5000u);
  EXPECT_EQ(budget_.peak("short-lived"), 1_MiB);
  stream_->fill_async(block.data(), std::byte{3}, 5000);  // the memory is still there
  EXPECT_EQ(download(block.data(), 1, *stream_).front(), std::byte{3});
}

TEST_P(ArenaTest, ALeakIsLoggedByDefault) {
  std::string lines;
  Block block;
  {
    const log::Capture capture([&](log::Level, const std::string& line) { lines += line + "\n"; });
    Arena arena(device_, budget_.reserve(1_MiB, "short-lived"), {.name = "leaky"});
    block = arena.allocate(5000, *stream_, "kept");
  }
  EXPECT_THAT(lines, HasSubstr("a block outlives its arena"));
  EXPECT_THAT(lines, HasSubstr("kept"));
}

TEST_P(ArenaTest, AnArenaGoesAfterTheWorkOnItsBlocks) {
  auto arena = std::make_unique<PinnedArena>(device_, budget_.reserve(1_MiB, "short-lived"));
  Block block = arena->allocate(1_MiB, *stream_);
  stream_->enqueue("sleep", [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
  stream_->fill_async(block.data(), std::byte{1}, 1_MiB);
  block.free();
  arena.reset();  // unmaps the memory: a fill that came later would crash
  stream_->synchronize();
}

TEST_P(ArenaTest, SeveralThreadsMayAllocate) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto stream = device_->make_stream({.name = fmt::format("worker {}", t)});
      for (int i = 0; i < 100; ++i) {
        Block block = arena_->allocate(16_KiB, *stream);
        stream->fill_async(block.data(), std::byte{1}, 16_KiB);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(arena_->stats().free_ranges, 1u);
  EXPECT_EQ(arena_->stats().allocations, 400u);
}

TEST_P(ArenaTest, AStreamMayGoBeforeTheBlocksItTouched) {
  Block block = arena_->allocate(4096, *stream_);
  auto event = device_->make_event();
  stream_->record(*event);
  {
    const auto brief = device_->make_stream({.name = "brief"});
    brief->wait(*event);
    brief->fill_async(block.on(*brief), std::byte{1}, 4096);
  }
  block.free();
  Block next = arena_->allocate(4096, *other_);
  other_->fill_async(next.data(), std::byte{2}, 4096);
  other_->synchronize();
}

TEST_P(ArenaTest, BadOptionsAreRefused) {
  EXPECT_THROW(Arena(device_, budget_.reserve(1_MiB, "odd"), {.alignment = 48}), UserError);
  EXPECT_THROW(Arena(device_, budget_.reserve(100, "tiny"), {.alignment = 4096}), UserError);
}

INSTANTIATE_TEST_SUITE_P(Devices, ArenaTest, ::testing::ValuesIn(device_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace pagoda::device

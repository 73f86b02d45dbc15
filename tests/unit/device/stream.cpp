// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/stream.h"

#include <atomic>
#include <thread>

#include "pagoda/device/emulated/emulated_device.h"
#include "unit/device/device_case.h"

namespace pagoda::device {
namespace {

using StreamTest = OnDevice;

TEST_P(StreamTest, CopiesGoRoundAtAnySizeAndAlignment) {
  for (const Bytes bytes : {Bytes{0}, Bytes{1}, Bytes{3}, Bytes{512}, Bytes{4097}, 1_MiB - 13}) {
    for (const Bytes shift : {0u, 1u, 7u}) {
      Block source = pinned_ramp(bytes + shift, 5);
      Block first = arena_->allocate(bytes + shift, *stream_);
      Block second = arena_->allocate(bytes + 2 * shift, *stream_);
      stream_->copy_async(first.data() + shift, source.on(*stream_) + shift, bytes,
                          Direction::HostToDevice, "up");
      stream_->copy_async(second.data() + 2 * shift, first.data() + shift, bytes,
                          Direction::DeviceToDevice, "across");
      EXPECT_EQ(download(second.data() + 2 * shift, bytes, *stream_),
                ramp(bytes, 5 + static_cast<unsigned>(shift)))
          << bytes << " bytes, shifted by " << shift;
    }
  }
}

TEST_P(StreamTest, ACopyOfNoBytesAcceptsNull) {
  stream_->copy_async(nullptr, nullptr, 0, Direction::HostToDevice);
  stream_->fill_async(nullptr, std::byte{1}, 0);
  stream_->synchronize();
  EXPECT_THROW(stream_->copy_async(nullptr, nullptr, 1, Direction::HostToDevice), UserError);
}

TEST_P(StreamTest, HostToHostCopies) {
  Block source = pinned_ramp(1000);
  Block target = pinned_->allocate(1000, *stream_);
  stream_->copy_async(target.data(), source.on(*stream_), 1000, Direction::HostToHost);
  stream_->synchronize();
  EXPECT_EQ(std::memcmp(target.data(), source.data(), 1000), 0);
}

TEST_P(StreamTest, FillsDeviceAndPinnedMemory) {
  Block block = arena_->allocate(1000, *stream_);
  Block pinned = pinned_->allocate(1000, *stream_);
  stream_->fill_async(block.data(), std::byte{0xAB}, 1000, "device");
  stream_->fill_async(pinned.data(), std::byte{0xCD}, 1000, "pinned");
  EXPECT_EQ(download(block.data(), 1000, *stream_), std::vector(1000, std::byte{0xAB}));
  EXPECT_EQ(pinned.data()[0], std::byte{0xCD});
  EXPECT_EQ(pinned.data()[999], std::byte{0xCD});
}

TEST_P(StreamTest, FunctionsRunInOrderOfIssue) {
  std::vector<int> seen;
  for (int i = 0; i < 100; ++i) stream_->enqueue("append", [&seen, i] { seen.push_back(i); });
  stream_->synchronize();
  ASSERT_EQ(seen.size(), 100u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_TRUE(stream_->idle());
}

TEST_P(StreamTest, SeveralThreadsMayIssueToOneStream) {
  std::atomic<int> ran = 0;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) stream_->enqueue("count", [&ran] { ++ran; });
    });
  }
  threads.clear();
  stream_->synchronize();
  EXPECT_EQ(ran, 200);
}

TEST_P(StreamTest, AnEventMakesAnotherStreamWait) {
  const auto event = device_->make_event();
  Block source = pinned_ramp(4096, 9);
  Block block = arena_->allocate(4096, *stream_);
  std::optional<Gate> gate;
  if (asynchronous()) gate.emplace(*stream_);
  stream_->copy_async(block.data(), source.on(*stream_), 4096, Direction::HostToDevice);
  stream_->record(*event);
  other_->wait(*event);
  Block out = pinned_->allocate(4096, *other_);
  other_->copy_async(out.data(), block.on(*other_), 4096, Direction::DeviceToHost);
  if (gate) {
    EXPECT_FALSE(event->done());
    EXPECT_FALSE(stream_->idle());
    EXPECT_FALSE(other_->idle());
    gate->open();
  }
  other_->synchronize();
  EXPECT_TRUE(event->done());
  EXPECT_EQ(std::memcmp(out.data(), source.data(), 4096), 0);
}

TEST_P(StreamTest, AnEventNeverRecordedIsDone) {
  const auto event = device_->make_event();
  EXPECT_TRUE(event->done());
  event->wait();
  stream_->wait(*event);
  stream_->synchronize();
}

TEST_P(StreamTest, RecordingAgainMovesNobodyWhoWaited) {
  if (!asynchronous()) GTEST_SKIP() << "nothing can be held back on the host device";
  const auto event = device_->make_event();
  stream_->record(*event);
  other_->wait(*event);
  Gate gate(*stream_);
  stream_->record(*event);
  other_->synchronize();  // would hang if it waited for the second record
  EXPECT_FALSE(event->done());
  gate.open();
  event->wait();
}

TEST_P(StreamTest, AFailureArrivesAtSynchronizeOnce) {
  bool ran = false;
  stream_->enqueue("fails", [] { throw EngineError("the kernel failed"); });
  stream_->enqueue("after", [&ran] { ran = true; });
  try {
    stream_->synchronize();
    FAIL() << "the failure was lost";
  } catch (const EngineError& error) {
    EXPECT_EQ(error.message(), "the kernel failed");
  }
  EXPECT_FALSE(ran) << "work after a failure runs on what it left";
  stream_->enqueue("again", [&ran] { ran = true; });
  stream_->synchronize();
  EXPECT_TRUE(ran);
}

TEST_P(StreamTest, AnEventKeepsTheFailureOfTheWorkItCovers) {
  const auto before = device_->make_event();
  const auto after = device_->make_event();
  const auto later = device_->make_event();
  stream_->record(*before);
  stream_->enqueue("fails", [] { throw EngineError("the kernel failed"); });
  stream_->record(*after);
  before->wait();
  EXPECT_THROW(after->wait(), EngineError);
  EXPECT_THROW(after->wait(), EngineError);
  EXPECT_TRUE(after->done());
  EXPECT_THROW(stream_->synchronize(), EngineError);
  stream_->record(*later);
  later->wait();
  EXPECT_THROW(after->wait(), EngineError) << "an event is not made good by the stream's recovery";
  stream_->record(*after);
  after->wait();
}

TEST_P(StreamTest, AFailureTravelsWithTheEventToOtherStreams) {
  for (const bool settled : {false, true}) {
    const auto event = device_->make_event();
    const auto third = device_->make_stream({.name = "third"});
    bool ran = false;
    bool unrelated = false;
    stream_->enqueue("fails", [] { throw EngineError("the kernel failed"); });
    stream_->record(*event);
    if (settled) {
      EXPECT_THROW(event->wait(), EngineError);
    }
    other_->wait(*event);
    other_->enqueue("uses it", [&ran] { ran = true; });
    third->wait(*event, Stream::OnFailure::Ignore);
    third->enqueue("only ordered after it", [&unrelated] { unrelated = true; });
    EXPECT_THROW(other_->synchronize(), EngineError);
    third->synchronize();
    EXPECT_FALSE(ran);
    EXPECT_TRUE(unrelated);
    EXPECT_THROW(stream_->synchronize(), EngineError);
  }
}

TEST_P(StreamTest, TheDeviceWaitsForAllStreamsAndThrowsOneFailure) {
  std::atomic<int> ran = 0;
  emulated::run_for(*stream_, 2'000'000, "sleep");
  stream_->enqueue("count", [&ran] { ++ran; });
  other_->enqueue("fails", [] { throw EngineError("other failed"); });
  EXPECT_THROW(device_->synchronize(), EngineError);
  EXPECT_EQ(ran, 1);
  device_->synchronize();
}

TEST_P(StreamTest, DestroyingAStreamWaitsForItsWork) {
  bool ran = false;
  auto stream = device_->make_stream({.name = "short-lived", .priority = -100});
  emulated::run_for(*stream, 1'000'000, "sleep");
  stream->enqueue("last", [&ran] { ran = true; });
  stream.reset();
  EXPECT_TRUE(ran);
}

TEST_P(StreamTest, AFunctionMayHoldTheLastHandleOfABlock) {
  auto block = std::make_shared<Block>(pinned_->allocate(4096, *stream_, "held"));
  stream_->enqueue("use", [block] { block->data()[0] = std::byte{1}; },
                   {Use::writes(block->data(), 4096)});
  block.reset();
  stream_->synchronize();
  EXPECT_EQ(pinned_->stats().blocks, 0u);
}

TEST_P(StreamTest, MarksAreSharedUntilSomethingIsIssued) {
  const Mark first = stream_->mark();
  const Mark again = stream_->mark();
  EXPECT_EQ(first.event, again.event);
  stream_->enqueue("work", [] {});
  const Mark later = stream_->mark();
  EXPECT_NE(first.event, later.event);
  EXPECT_GT(later.position, first.position);
  EXPECT_EQ(later.stream, stream_->id());
  later.event->wait();
}

TEST_P(StreamTest, TimedEventsMeasureWhatLiesBetween) {
  const auto begin = device_->make_event({.timing = true, .blocking = true});
  const auto end = device_->make_event({.timing = true, .blocking = true});
  stream_->record(*begin);
  emulated::run_for(*stream_, 3'000'000, "sleep");
  stream_->record(*end);
  end->wait();
  EXPECT_GE(end->seconds_since(*begin), 0.0025);
}

TEST_P(StreamTest, EventsOfAnotherDeviceAreRefused) {
  const auto elsewhere = GetParam().make(nullptr);
  const auto event = elsewhere->make_event();
  EXPECT_THROW(stream_->record(*event), UserError);
}

TEST_P(StreamTest, TheDeviceKnowsItsMemory) {
  const MemoryInfo info = device_->memory_info();
  EXPECT_GT(info.total, 0u);
  EXPECT_LE(info.free, info.total);
  EXPECT_FALSE(device_->name().empty());
}

TEST_P(StreamTest, AnEmptyFunctionIsRefused) {
  EXPECT_THROW(stream_->enqueue("nothing", nullptr), UserError);
}

INSTANTIATE_TEST_SUITE_P(Devices, StreamTest, ::testing::ValuesIn(device_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace pagoda::device

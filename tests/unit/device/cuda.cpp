// SPDX-License-Identifier: Apache-2.0
// What only CUDA has: native streams, registered pages, copies beyond 2 GiB.
#include <thread>

#include "pagoda/device/cuda/cuda_device.h"
#include "unit/device/device_case.h"

namespace pagoda::device {
namespace {

using CudaTest = OnDevice;

TEST_P(CudaTest, AWrappedStreamIsTheStreamItself) {
  const auto wrapped = device_->wrap_stream(stream_->native_handle(), "wrapped");
  const auto again = device_->wrap_stream(stream_->native_handle(), "again");
  EXPECT_EQ(wrapped->native_handle(), stream_->native_handle());
  EXPECT_EQ(wrapped->id(), again->id());
  EXPECT_NE(wrapped->mark().event, wrapped->mark().event) << "others may have launched meanwhile";
  Block source = pinned_ramp(4096, 3);
  Block block = arena_->allocate(4096, *wrapped);
  wrapped->copy_async(block.data(), source.on(*wrapped), 4096, Direction::HostToDevice);
  EXPECT_EQ(download(block.data(), 4096, *again), ramp(4096, 3));
}

TEST_P(CudaTest, AStreamWhoseHandleIsOutGetsANewMarkEachTime) {
  EXPECT_EQ(stream_->mark().event, stream_->mark().event);
  const Mark before = stream_->mark();
  EXPECT_NE(stream_->native_handle(), nullptr);
  EXPECT_NE(before.event, stream_->mark().event) << "a launch behind our back would not be covered";
}

TEST_P(CudaTest, TheDefaultStreamCanBeWrapped) {
  const auto legacy = device_->wrap_stream(nullptr, "default");
  Block block = arena_->allocate(4096, *legacy);
  legacy->fill_async(block.data(), std::byte{9}, 4096);
  EXPECT_EQ(download(block.data(), 4096, *legacy), std::vector(4096, std::byte{9}));
}

TEST_P(CudaTest, CopiesMayBeLargerThanTwoGiB) {
  constexpr Bytes kBytes = 2_GiB + 4_MiB + 5;
  const auto memory = device_->allocate(MemoryKind::Device, kBytes, {.name = "large"});
  const auto pinned = device_->allocate(MemoryKind::Pinned, kBytes, {.name = "large pinned"});
  const auto mark = [&](Bytes at, std::byte value) { pinned->data()[at] = value; };
  checker_->host_write(pinned->data(), kBytes, "marks");
  mark(0, std::byte{1});
  mark(2_GiB, std::byte{2});
  mark(kBytes - 1, std::byte{3});
  stream_->copy_async(memory->data(), pinned->data(), kBytes, Direction::HostToDevice);
  stream_->synchronize();
  for (const Bytes at : {Bytes{0}, 2_GiB, kBytes - 1}) mark(at, std::byte{0});
  stream_->copy_async(pinned->data(), memory->data(), kBytes, Direction::DeviceToHost);
  stream_->synchronize();
  EXPECT_EQ(pinned->data()[0], std::byte{1});
  EXPECT_EQ(pinned->data()[2_GiB], std::byte{2});
  EXPECT_EQ(pinned->data()[kBytes - 1], std::byte{3});
}

TEST_P(CudaTest, PinnedCopiesDoNotBlockTheCaller) {
  Block source = pinned_ramp(1_MiB);
  Block block = arena_->allocate(1_MiB, *stream_);
  Gate gate(*stream_);
  stream_->copy_async(block.data(), source.on(*stream_), 1_MiB, Direction::HostToDevice);
  EXPECT_FALSE(stream_->idle());  // a pageable source would have hung here
  gate.open();
  stream_->synchronize();
}

TEST_P(CudaTest, MoreMemoryThanThereIsFails) {
  const Bytes total = device_->memory_info().total;
  EXPECT_THROW(device_->allocate(MemoryKind::Device, total * 2), EngineError);
  Block block = arena_->allocate(4096, *stream_);  // and leaves no error behind
  stream_->fill_async(block.data(), std::byte{1}, 4096);
  stream_->synchronize();
}

TEST_P(CudaTest, AnotherThreadMayUseTheDevice) {
  Block block = arena_->allocate(4096, *stream_);
  std::jthread([&] {
    const auto stream = device_->make_stream({.name = "of the thread", .priority = -1});
    const auto event = device_->make_event();
    stream_->record(*event);
    stream->wait(*event);
    stream->fill_async(block.on(*stream), std::byte{4}, 4096);
    stream->synchronize();
  }).join();
  EXPECT_EQ(download(block.data(), 1, *stream_).front(), std::byte{4});
}

TEST_P(CudaTest, ThereIsNoSuchGpu) {
  EXPECT_THROW(cuda::make_device({.index = 1000}), UserError);
  EXPECT_GE(cuda::device_count(), 1);
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaTest, ::testing::ValuesIn(device_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace pagoda::device

// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "unit/device/device_case.h"

namespace pagoda::device {
namespace {

using ::testing::HasSubstr;

TEST(EmulatedLink, CopiesTakeTurnsAtFullBandwidth) {
  emulated::Link link({.bytes_per_second = 1e9, .latency = 100});
  const auto first = link.take(1000, 5000);
  EXPECT_EQ(first.begin, 5000);
  EXPECT_EQ(first.end, 5000 + 1000 + 100);
  const auto second = link.take(500, 5200);  // behind the first, but not behind its latency
  EXPECT_EQ(second.begin, 6000);
  EXPECT_EQ(second.end, 6000 + 500 + 100);
  const auto third = link.take(1, 9000);
  EXPECT_EQ(third.begin, 9000);
}

TEST(EmulatedLink, WithoutABandwidthOnlyLatencyCounts) {
  emulated::Link link({.bytes_per_second = 0, .latency = 7});
  EXPECT_EQ(link.take(1_GiB, 100).end, 107);
}

TEST(EmulatedDevice, HasOnlySoMuchMemory) {
  Budget budget("device", 1_GiB);
  const auto device = emulated::make_device({.memory = 8_MiB});
  {
    Arena arena(device, budget.reserve(6_MiB, "arena"));
    EXPECT_EQ(device->memory_info().free, 2_MiB);
    EXPECT_THROW(Arena(device, budget.reserve(4_MiB, "arena")), EngineError);
    PinnedArena pinned(device, budget.reserve(16_MiB, "pinned"));  // that is the host's memory
  }
  EXPECT_EQ(device->memory_info().free, 8_MiB);
}

/// Without the checker, a forgotten wait is seen as wrong bytes: the copies really are late.
TEST(EmulatedDevice, AForgottenWaitReadsOldBytes) {
  const auto device = emulated::make_device({.checker = nullptr});
  const auto copies = device->make_stream({.name = "copies"});
  const auto compute = device->make_stream({.name = "compute"});
  const auto memory = device->allocate(MemoryKind::Device, 4096);
  const auto pinned = device->allocate(MemoryKind::Pinned, 2 * 4096);
  std::memset(pinned->data(), 7, 4096);
  Gate gate(*copies);
  copies->copy_async(memory->data(), pinned->data(), 4096, Direction::HostToDevice);
  compute->copy_async(pinned->data() + 4096, memory->data(), 4096, Direction::DeviceToHost);
  compute->synchronize();
  EXPECT_EQ(pinned->data()[4096], std::byte{0});
  gate.open();
  copies->synchronize();
}

TEST(EmulatedDevice, AFailureNobodyLookedAtIsLogged) {
  for (const auto& device : {emulated::make_device(), host::make_device()}) {
    std::string lines;
    const log::Capture capture([&](log::Level, const std::string& line) { lines += line; });
    auto stream = device->make_stream({.name = "forgotten"});
    stream->enqueue("fails", [] { throw EngineError("the kernel failed"); });
    stream.reset();
    EXPECT_THAT(lines, HasSubstr("never looked at"));
    EXPECT_THAT(lines, HasSubstr("forgotten"));
  }
}

TEST(EmulatedDevice, AFunctionMayHoldTheLastReferenceToItsStream) {
  const auto device = emulated::make_device();
  std::promise<void> ran;
  {
    auto stream = device->make_stream({.name = "self"});
    stream->enqueue("hold", [stream, &ran] { ran.set_value(); });
  }
  ran.get_future().wait();
}

TEST(EmulatedDevice, HasNoNativeStreams) {
  EXPECT_THROW(emulated::make_device()->wrap_stream(nullptr, "torch"), UserError);
  EXPECT_THROW(host::make_device()->wrap_stream(nullptr, "torch"), UserError);
}

TEST(EmulatedDevice, EventsOfAnotherKindAreRefused) {
  const auto stream = emulated::make_device()->make_stream();
  const auto event = host::make_device()->make_event();
  EXPECT_THROW(stream->wait(*event), UserError);
}

}  // namespace
}  // namespace pagoda::device

// SPDX-License-Identifier: Apache-2.0
// On the emulated device copies overlap work, the two directions overlap each other, and one
// direction is shared. Judged by the recorded slices relative to each other, never by the clock on
// the wall.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "pagoda/base/trace.h"
#include "pagoda/device/emulated/emulated_device.h"

namespace pagoda::device {
namespace {

struct Slice {
  std::string track;
  std::string name;
  double begin = 0;  // microseconds
  double end = 0;
};

/// What was recorded, by begin.
std::vector<Slice> recorded_slices() {
  trace::stop();
  const nlohmann::json trace = nlohmann::json::parse(trace::to_json());
  std::map<int, std::string> tracks;
  std::vector<Slice> slices;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "M") tracks[event["tid"]] = event["args"]["name"];
  }
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X" || event["cat"] != "device") continue;
    const double begin = event["ts"];
    const double duration = event["dur"];
    slices.push_back({tracks[event["tid"]], event["name"], begin, begin + duration});
  }
  std::ranges::sort(slices, {}, &Slice::begin);
  return slices;
}

const Slice& find(const std::vector<Slice>& slices, const std::string& name) {
  const auto it = std::ranges::find(slices, name, &Slice::name);
  if (it == slices.end()) throw EngineError("no slice " + name);
  return *it;
}

double overlap(const Slice& a, const Slice& b) {
  return std::max(0.0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}

class Overlap : public ::testing::Test {
 protected:
  static constexpr Bytes kPage = 1_MiB;
  static constexpr Nanos kCopy = 30'000'000;  // what a page takes on either link
  /// More than the moment by which one slice outlasts the next one's begin, in microseconds.
  static constexpr double kMuch = 0.3 * kCopy / 1000;
  static constexpr emulated::LinkOptions kLink{
      .bytes_per_second = static_cast<double>(kPage) * 1e9 / static_cast<double>(kCopy)};

  std::shared_ptr<OrderingChecker> checker_ = std::make_shared<OrderingChecker>();
  std::shared_ptr<Device> device_ = emulated::make_device(
      {.host_to_device = kLink, .device_to_host = kLink, .checker = checker_});
  std::unique_ptr<Memory> memory_ = device_->allocate(MemoryKind::Device, 4 * kPage);
  std::unique_ptr<Memory> pinned_ = device_->allocate(MemoryKind::Pinned, 4 * kPage);
  std::shared_ptr<Stream> up_ = device_->make_stream({.name = "up"});
  std::shared_ptr<Stream> down_ = device_->make_stream({.name = "down"});
  std::shared_ptr<Stream> compute_ = device_->make_stream({.name = "compute"});
};

TEST_F(Overlap, ACopyOverlapsAKernel) {
  trace::start();
  up_->copy_async(memory_->data(), pinned_->data(), kPage, Direction::HostToDevice, "load");
  emulated::run_for(*compute_, kCopy, "kernel");
  device_->synchronize();
  const auto slices = recorded_slices();
  EXPECT_EQ(find(slices, "load").track, "up");
  EXPECT_EQ(find(slices, "kernel").track, "compute");
  EXPECT_GT(overlap(find(slices, "load"), find(slices, "kernel")), kMuch);
}

TEST_F(Overlap, TheTwoDirectionsAreIndependent) {
  trace::start();
  up_->copy_async(memory_->data(), pinned_->data(), kPage, Direction::HostToDevice, "load");
  down_->copy_async(pinned_->data() + kPage, memory_->data() + kPage, kPage,
                    Direction::DeviceToHost, "store");
  device_->synchronize();
  const auto slices = recorded_slices();
  EXPECT_GT(overlap(find(slices, "load"), find(slices, "store")), kMuch);
}

TEST_F(Overlap, OneDirectionIsSharedInTurns) {
  trace::start();
  up_->copy_async(memory_->data(), pinned_->data(), kPage, Direction::HostToDevice, "one");
  down_->copy_async(memory_->data() + kPage, pinned_->data() + kPage, kPage,
                    Direction::HostToDevice, "two");
  device_->synchronize();
  const auto slices = recorded_slices();
  // However late the threads woke up, the link itself was busy for two pages.
  EXPECT_GE(slices[1].end - slices[0].begin, 1.5 * kCopy / 1000);
  // The first began at once; how late its thread woke up for its end says nothing of the link.
  EXPECT_GE(slices[1].begin - slices[0].begin, 0.5 * kCopy / 1000);
}

TEST_F(Overlap, AnEventPutsTheKernelAfterTheCopy) {
  const auto loaded = device_->make_event();
  trace::start();
  up_->copy_async(memory_->data(), pinned_->data(), kPage, Direction::HostToDevice, "load");
  up_->record(*loaded);
  compute_->wait(*loaded);
  compute_->enqueue("kernel", [] {}, {Use::reads(memory_->data(), kPage)});
  device_->synchronize();
  const auto slices = recorded_slices();
  EXPECT_GE(find(slices, "kernel").begin, find(slices, "load").end);
}

TEST_F(Overlap, APipelineTakesTheTimeOfItsSlowestStage) {
  constexpr int kPages = 5;
  const auto page = [](const std::unique_ptr<Memory>& memory, int i) {
    return memory->data() + kPage / 8 * static_cast<Bytes>(i);
  };
  constexpr Nanos kPart = kCopy / 2;  // half a page a stage
  trace::start();
  for (int i = 0; i < kPages; ++i) {
    const auto loaded = device_->make_event();
    const auto computed = device_->make_event();
    up_->copy_async(page(memory_, 5 * i), page(pinned_, 5 * i), kPage / 2, Direction::HostToDevice,
                    "load");
    up_->record(*loaded);
    compute_->wait(*loaded);
    compute_->enqueue("kernel", [] { sleep_until_ns(now_ns() + kPart); },
                      {Use::writes(page(memory_, 5 * i), kPage / 2)});
    compute_->record(*computed);
    down_->wait(*computed);
    down_->copy_async(page(pinned_, 5 * i), page(memory_, 5 * i), kPage / 2,
                      Direction::DeviceToHost, "store");
  }
  device_->synchronize();
  const auto slices = recorded_slices();
  ASSERT_EQ(slices.size(), 3u * kPages);
  double last = 0;
  double busy = 0;
  for (const Slice& slice : slices) {
    last = std::max(last, slice.end);
    busy += slice.end - slice.begin;
  }
  const double total = last - slices.front().begin;
  // One stage after another would take `busy`; perfect overlap (kPages + 2) parts.
  EXPECT_GE(total, 0.9 * (kPages + 2) * static_cast<double>(kPart) / 1000);
  EXPECT_LE(total, 0.8 * busy);
}

}  // namespace
}  // namespace pagoda::device

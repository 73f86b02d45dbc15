// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/budget.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/device.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/device/pinned_arena.h"

namespace pagoda::device {

/// A device the shared suite runs on. Each binary has its own list: cases_here.cpp, cases_cuda.cpp.
struct DeviceCase {
  std::string name;
  std::shared_ptr<Device> (*make)(std::shared_ptr<OrderingChecker> checker);
  /// Empty, or why this machine cannot run it.
  std::string (*missing)();
};
std::vector<DeviceCase> device_cases();

inline void PrintTo(const DeviceCase& device, std::ostream* out) {
  *out << device.name;
}

/// A device with the ordering checker on, and small arenas of both kinds.
class OnDevice : public ::testing::TestWithParam<DeviceCase> {
 protected:
  static constexpr Bytes kArena = 4_MiB;

  void SetUp() override {
    const std::string missing = GetParam().missing();
    if (!missing.empty()) GTEST_SKIP() << missing;
    device_ = GetParam().make(checker_);
    arena_ = std::make_unique<Arena>(device_, budget_.reserve(kArena, "device"),
                                     ArenaOptions{.name = "device arena"});
    pinned_ = std::make_unique<PinnedArena>(device_, budget_.reserve(kArena, "pinned"),
                                            ArenaOptions{.name = "pinned arena"});
    stream_ = device_->make_stream({.name = "first"});
    other_ = device_->make_stream({.name = "second"});
  }

  void TearDown() override {
    for (const std::string& violation : checker_->take_violations()) ADD_FAILURE() << violation;
  }

  /// Whether work outlasts the call that issues it, so that a gate can hold it back.
  bool asynchronous() const { return device_->kind() != DeviceKind::Host; }

  /// A pinned block whose bytes are `first`, `first + 1`, …
  Block pinned_ramp(Bytes bytes, unsigned first = 0) {
    Block block = pinned_->allocate(bytes, "ramp");
    checker_->host_write(block.data(), bytes, "ramp");
    for (Bytes i = 0; i < bytes; ++i) block.data()[i] = static_cast<std::byte>(first + i);
    return block;
  }

  /// What lies at `data` in device memory, once `stream` has done all its work.
  std::vector<std::byte> download(const std::byte* data, Bytes bytes, Stream& stream) {
    if (bytes == 0) return {};
    Block block = pinned_->allocate(bytes, "download");
    stream.copy_async(block.on(stream), data, bytes, Direction::DeviceToHost, "download");
    stream.synchronize();
    checker_->host_read(block.data(), bytes, "download");
    return {block.data(), block.data() + bytes};
  }

  Budget budget_{"test", 64_MiB};
  std::shared_ptr<OrderingChecker> checker_ = std::make_shared<OrderingChecker>();
  std::shared_ptr<Device> device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Arena> pinned_;
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<Stream> other_;
};

/// Holds a stream back until it is opened.
class Gate {
 public:
  explicit Gate(Stream& stream) {
    stream.enqueue("gate", [opened = opened_.get_future().share()] { opened.wait(); });
  }
  ~Gate() { open(); }
  void open() {
    if (!std::exchange(open_, true)) opened_.set_value();
  }

 private:
  bool open_ = false;
  std::promise<void> opened_;
};

inline std::vector<std::byte> ramp(Bytes bytes, unsigned first = 0) {
  std::vector<std::byte> values(bytes);
  for (Bytes i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>(first + i);
  return values;
}

}  // namespace pagoda::device

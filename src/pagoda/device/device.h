// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/event.h"
#include "pagoda/device/memory.h"
#include "pagoda/device/stream.h"

namespace pagoda::device {

class OrderingChecker;

enum class DeviceKind { Host, Emulated, Cuda };

/// "host", "emulated" or "cuda".
const char* name(DeviceKind kind);

/// How much memory the device has, and how much of it nobody has taken.
struct MemoryInfo {
  Bytes free = 0;
  Bytes total = 0;
};

/// An accelerator, or what stands in for one: makes streams, events and memory.
///
/// Backends are host/ (work is done when the call returns), emulated/ (streams of its own threads,
/// links of a set speed) and cuda/. Streams, events and memory keep their device alive. All members
/// may be called from any thread.
class Device : public std::enable_shared_from_this<Device> {
 public:
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device();

  DeviceKind kind() const noexcept { return kind_; }
  /// As messages should say it: "cuda:0 (NVIDIA H200)".
  const std::string& name() const noexcept { return name_; }
  /// Follows the order of all work on this device; null when off.
  const std::shared_ptr<OrderingChecker>& checker() const noexcept { return checker_; }

  std::shared_ptr<Stream> make_stream(const StreamOptions& options = {});
  /// A stream that someone else owns and keeps alive (torch's current one). UserError where the
  /// backend has no native streams.
  std::shared_ptr<Stream> wrap_stream(void* native, std::string name);
  std::shared_ptr<Event> make_event(const EventOptions& options = {});
  /// Takes memory from the machine. Of its own it belongs to no budget: an Arena brings that.
  std::unique_ptr<Memory> allocate(MemoryKind kind, Bytes bytes, const MemoryOptions& options = {});

  /// Waits for all streams of this device. Rethrows one failure; others stay with their streams.
  void synchronize();

  virtual MemoryInfo memory_info() const = 0;
  /// Whether its kernels may read page-locked memory where it lies, by the host's addresses.
  virtual bool reads_pinned_memory() const { return true; }

 protected:
  Device(DeviceKind kind, std::string name, std::shared_ptr<OrderingChecker> checker);

 private:
  virtual std::shared_ptr<Stream> do_make_stream(const StreamOptions& options) = 0;
  virtual std::shared_ptr<Stream> do_wrap_stream(void* native, std::string name);
  virtual std::shared_ptr<Event> do_make_event(const EventOptions& options) = 0;
  virtual std::unique_ptr<Memory> do_allocate(MemoryKind kind, Bytes bytes,
                                              const MemoryOptions& options) = 0;

  std::shared_ptr<Stream> remember(std::shared_ptr<Stream> stream);

  const DeviceKind kind_;
  const std::string name_;
  const std::shared_ptr<OrderingChecker> checker_;
  RankedMutex<LockRank::Device> mutex_;
  std::vector<std::weak_ptr<Stream>> streams_;  // guarded by mutex_
};

}  // namespace pagoda::device

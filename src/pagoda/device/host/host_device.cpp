// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/host/host_device.h"

#include <cstring>
#include <exception>
#include <mutex>
#include <string>

#include <sys/sysinfo.h>

#include "pagoda/base/clock.h"
#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/memory_limit.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/host_pages.h"

namespace pagoda::device::host {
namespace {

/// Always done: what it covers was over when it was recorded.
class HostEvent final : public Event {
 public:
  using Event::Event;

  void set(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    time_ = now_ns();
  }
  std::exception_ptr failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  explicit HostEvent(std::shared_ptr<Device> device) : Event(std::move(device)) {}

 private:
  void do_wait() override {
    if (const std::exception_ptr failure = this->failure()) std::rethrow_exception(failure);
  }
  bool do_done() override { return true; }
  double do_seconds_since(Event& begin) override {
    return static_cast<double>(time() - static_cast<HostEvent&>(begin).time()) * 1e-9;
  }
  Nanos time() const {
    const std::lock_guard lock(mutex_);
    PAGODA_REQUIRE_GT(time_, 0, "the event was never recorded");
    return time_;
  }

  mutable RankedMutex<LockRank::HostEvent> mutex_;
  std::exception_ptr failure_;  // guarded by mutex_
  Nanos time_ = 0;              // guarded by mutex_
};

class HostStream final : public Stream {
 public:
  HostStream(std::shared_ptr<Device> device, std::string name)
      : Stream(std::move(device), std::move(name), Ownership::Owned, next_id()) {}
  ~HostStream() override {
    if (failure_) log::error("device", "a failure was never looked at", {{"stream", name()}});
  }

 private:
  /// Runs work unless earlier work has failed. Called under the base's issue lock.
  template <class Work>
  void run(std::string_view label, Bytes bytes, const Work& work) {
    if (failure()) return;
    const Nanos begin = now_ns();
    try {
      work();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    if (trace::on()) trace::slice("device", label, begin, now_ns(), {{"bytes", bytes}}, name());
  }
  std::exception_ptr failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  void do_copy(void* dst, const void* src, Bytes bytes, Direction direction,
               std::string_view label) override {
    run(label.empty() ? device::name(direction) : label, bytes,
        [&] { std::memcpy(dst, src, bytes); });
  }
  void do_fill(void* dst, std::byte value, Bytes bytes, std::string_view label) override {
    run(label.empty() ? "fill" : label, bytes,
        [&] { std::memset(dst, static_cast<int>(value), bytes); });
  }
  void do_enqueue(std::string_view label, std::function<void()> fn) override { run(label, 0, fn); }
  void do_record(Event& event) override { static_cast<HostEvent&>(event).set(failure()); }
  void do_wait(Event& event, OnFailure on_failure) override {
    if (on_failure == OnFailure::Ignore) return;
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = static_cast<HostEvent&>(event).failure();
  }
  bool do_idle() override { return true; }
  void do_drain() override {}
  void do_rethrow() override {
    std::exception_ptr failure;
    {
      const std::lock_guard lock(mutex_);
      failure = std::exchange(failure_, nullptr);
    }
    if (failure) std::rethrow_exception(failure);
  }

  mutable RankedMutex<LockRank::HostStream> mutex_;
  std::exception_ptr failure_;  // guarded by mutex_
};

class HostDevice final : public Device {
 public:
  explicit HostDevice(Options options)
      : Device(DeviceKind::Host, std::move(options.name), std::move(options.checker)) {}

  MemoryInfo memory_info() const override {
    struct sysinfo info {};
    PAGODA_CHECK_EQ(::sysinfo(&info), 0);
    // Not freeram: what the page cache has is free for whoever asks for it.
    return {available_memory(), info.totalram * Bytes{info.mem_unit}};
  }

 private:
  std::shared_ptr<Stream> do_make_stream(const StreamOptions& options) override {
    return std::make_shared<HostStream>(shared_from_this(), options.name);
  }
  std::shared_ptr<Event> do_make_event(const EventOptions&) override {
    return std::make_shared<HostEvent>(shared_from_this());
  }
  std::unique_ptr<Memory> do_allocate(MemoryKind kind, Bytes bytes,
                                      const MemoryOptions& options) override {
    // "Device" memory is only reserved: a budget of half the machine costs nothing until pages fill
    // it. Pinned memory stands for what a GPU reads: it is there from the start, as with CUDA.
    const auto touch = kind == MemoryKind::Device ? HostPages::Touch::Later : HostPages::Touch::Now;
    auto pages = std::make_shared<HostPages>(bytes, touch, options.touchers);
    std::byte* data = pages->data();
    return std::make_unique<Memory>(kind, data, bytes, std::move(pages));
  }
};

}  // namespace

std::shared_ptr<Device> make_device(Options options) {
  return std::make_shared<HostDevice>(std::move(options));
}

}  // namespace pagoda::device::host

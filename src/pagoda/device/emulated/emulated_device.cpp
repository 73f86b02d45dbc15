// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/emulated/emulated_device.h"

#include <atomic>
#include <cstring>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/emulated/emulated_event.h"
#include "pagoda/device/emulated/work_queue.h"
#include "pagoda/device/host_pages.h"

namespace pagoda::device::emulated {
namespace {

class EmulatedDevice;

/// The links outlive the device while a stream's thread still has copies to make.
struct Links {
  explicit Links(const Options& options)
      : host_to_device(options.host_to_device),
        device_to_host(options.device_to_host),
        device_to_device(options.device_to_device) {}

  Link* of(Direction direction) {
    switch (direction) {
      case Direction::HostToDevice:
        return &host_to_device;
      case Direction::DeviceToHost:
        return &device_to_host;
      case Direction::DeviceToDevice:
        return &device_to_device;
      case Direction::HostToHost:
        break;
    }
    return nullptr;
  }

  Link host_to_device;
  Link device_to_host;
  Link device_to_device;
};

class EmulatedStream final : public Stream {
 public:
  EmulatedStream(std::shared_ptr<Device> device, std::shared_ptr<Links> links, std::string name)
      : Stream(std::move(device), std::move(name), Ownership::Owned, next_id()),
        links_(std::move(links)),
        queue_(this->name()) {}

  bool capturing() const override { return capturing_; }
  void set_capturing(bool capturing) noexcept { capturing_ = capturing; }

 private:
  void do_copy(void* dst, const void* src, Bytes bytes, Direction direction,
               std::string_view label) override {
    queue_.push([=, links = links_, track = name(),
                 label = std::string(label.empty() ? device::name(direction) : label)](
                    std::exception_ptr& failure) {
      if (failure) return;
      Link* link = links->of(direction);
      const Link::Slot slot = link != nullptr ? link->take(bytes, now_ns()) : Link::Slot{};
      auto* to = static_cast<std::byte*>(dst);
      const auto* from = static_cast<const std::byte*>(src);
      const Bytes half = bytes / 2;
      sleep_until_ns(slot.begin);
      const Nanos begin = now_ns();
      std::memcpy(to, from, half);
      sleep_until_ns(slot.end);
      std::memcpy(to + half, from + half, bytes - half);
      trace::slice("device", label, begin, now_ns(), {{"bytes", bytes}}, track);
    });
  }

  void do_fill(void* dst, std::byte value, Bytes bytes, std::string_view label) override {
    queue_.push([=, track = name(),
                 label = std::string(label.empty() ? "fill" : label)](std::exception_ptr& failure) {
      if (failure) return;
      const Nanos begin = now_ns();
      std::memset(dst, static_cast<int>(value), bytes);
      trace::slice("device", label, begin, now_ns(), {{"bytes", bytes}}, track);
    });
  }

  void do_enqueue(std::string_view label, std::function<void()> fn) override {
    queue_.push([fn = std::move(fn), track = name(),
                 label = std::string(label)](std::exception_ptr& failure) {
      if (failure) return;
      const Nanos begin = now_ns();
      try {
        fn();
      } catch (...) {
        failure = std::current_exception();
      }
      trace::slice("device", label, begin, now_ns(), {}, track);
    });
  }

  void do_record(Event& event) override {
    auto ticket = static_cast<EmulatedEvent&>(event).renew();
    queue_.push([ticket](std::exception_ptr& failure) { ticket->set(failure); });
  }

  void do_wait(Event& event, OnFailure on_failure) override {
    auto ticket = static_cast<EmulatedEvent&>(event).ticket();
    if (!ticket) return;
    queue_.push([ticket, on_failure](std::exception_ptr& failure) {
      const std::exception_ptr theirs = ticket->wait();
      if (!failure && on_failure == OnFailure::Inherit) failure = theirs;
    });
  }

  bool do_idle() override { return queue_.idle(); }
  void do_drain() override { queue_.drain(); }
  void do_rethrow() override {
    if (const std::exception_ptr failure = queue_.take_failure()) std::rethrow_exception(failure);
  }

  const std::shared_ptr<Links> links_;
  WorkQueue queue_;
  std::atomic<bool> capturing_ = false;
};

/// Pages that count against the emulated device's memory.
struct CountedPages {
  CountedPages(Bytes bytes, ThreadPool* touchers, HostPages::Touch touch,
               std::shared_ptr<std::atomic<Bytes>> counter)
      : pages(bytes, touch, touchers), used(std::move(counter)) {}
  CountedPages(const CountedPages&) = delete;
  CountedPages& operator=(const CountedPages&) = delete;
  ~CountedPages() {
    if (used) *used -= pages.size();
  }

  HostPages pages;
  std::shared_ptr<std::atomic<Bytes>> used;  // null: pinned memory, which is the host's
};

class EmulatedDevice final : public Device {
 public:
  explicit EmulatedDevice(const Options& options)
      : Device(DeviceKind::Emulated, options.name, options.checker),
        links_(std::make_shared<Links>(options)),
        total_(options.memory) {}

  MemoryInfo memory_info() const override { return {total_ - *used_, total_}; }

 private:
  std::shared_ptr<Stream> do_make_stream(const StreamOptions& options) override {
    return std::make_shared<EmulatedStream>(shared_from_this(), links_, options.name);
  }
  std::shared_ptr<Event> do_make_event(const EventOptions&) override {
    return std::make_shared<EmulatedEvent>(shared_from_this());
  }
  std::unique_ptr<Memory> do_allocate(MemoryKind kind, Bytes bytes,
                                      const MemoryOptions& options) override {
    const bool counted = kind == MemoryKind::Device;
    if (counted && used_->fetch_add(bytes) + bytes > total_) {
      *used_ -= bytes;
      throw EngineError(fmt::format("out of device memory: '{}' wants {} of {}", options.name,
                                    format_bytes(bytes), format_bytes(memory_info().free)));
    }
    std::shared_ptr<CountedPages> pages;
    try {
      // Device memory is touched by its first user: an emulated one may be larger than the host.
      const auto touch = counted ? HostPages::Touch::Later : HostPages::Touch::Now;
      pages =
          std::make_shared<CountedPages>(bytes, options.touchers, touch, counted ? used_ : nullptr);
    } catch (...) {
      if (counted) *used_ -= bytes;
      throw;
    }
    std::byte* data = pages->pages.data();
    return std::make_unique<Memory>(kind, data, bytes, std::move(pages));
  }

  const std::shared_ptr<Links> links_;
  const Bytes total_;
  const std::shared_ptr<std::atomic<Bytes>> used_ = std::make_shared<std::atomic<Bytes>>(0);
};

}  // namespace

std::shared_ptr<Device> make_device(Options options) {
  return std::make_shared<EmulatedDevice>(options);
}

void run_for(Stream& stream, Nanos duration, std::string_view label) {
  stream.enqueue(label, [duration] { sleep_until_ns(now_ns() + duration); });
}

void set_capturing(Stream& stream, bool capturing) {
  dynamic_cast<EmulatedStream&>(stream).set_capturing(capturing);
}

}  // namespace pagoda::device::emulated

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/device.h"

#include "pagoda/base/error.h"
#include "pagoda/device/ordering_checker.h"

namespace pagoda::device {

const char* name(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::Host:
      return "host";
    case DeviceKind::Emulated:
      return "emulated";
    case DeviceKind::Cuda:
      return "cuda";
  }
  return "?";
}

Device::Device(DeviceKind kind, std::string name, std::shared_ptr<OrderingChecker> checker)
    : kind_(kind), name_(std::move(name)), checker_(std::move(checker)) {}

Device::~Device() = default;

std::shared_ptr<Stream> Device::remember(std::shared_ptr<Stream> stream) {
  const std::lock_guard lock(mutex_);
  std::erase_if(streams_, [](const auto& known) { return known.expired(); });
  streams_.push_back(stream);
  return stream;
}

std::shared_ptr<Stream> Device::make_stream(const StreamOptions& options) {
  return remember(do_make_stream(options));
}

std::shared_ptr<Stream> Device::wrap_stream(void* native, std::string name) {
  return remember(do_wrap_stream(native, std::move(name)));
}

std::shared_ptr<Stream> Device::do_wrap_stream(void*, std::string) {
  throw UserError(fmt::format("the {} device has no native streams to wrap", device::name(kind_)));
}

std::shared_ptr<Event> Device::make_event(const EventOptions& options) {
  return do_make_event(options);
}

std::unique_ptr<Memory> Device::allocate(MemoryKind kind, Bytes bytes,
                                         const MemoryOptions& options) {
  PAGODA_REQUIRE_GT(bytes, 0u, "memory '{}' of no bytes", options.name);
  std::unique_ptr<Memory> memory = do_allocate(kind, bytes, options);
  if (checker_) {
    checker_->added_memory(*memory, options.name);
    memory->checker_ = checker_;
  }
  return memory;
}

void Device::synchronize() {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : streams_) {
      if (auto stream = known.lock()) streams.push_back(std::move(stream));
    }
  }
  for (const auto& stream : streams) stream->do_drain();
  for (const auto& stream : streams) stream->synchronize();
}

}  // namespace pagoda::device

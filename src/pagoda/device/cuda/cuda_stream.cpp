// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/cuda/cuda_stream.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/device.h"

namespace pagoda::device::cuda {
namespace {

/// "Not yet" is no error, but the runtime remembers it as the last one: forget it, or torch's next
/// look at the last error finds it.
bool is_over(cudaError_t code, std::string_view call) {
  if (code == cudaErrorNotReady) {
    runtime().GetLastError();
    return false;
  }
  check(code, call);
  return true;
}

cudaMemcpyKind native(Direction direction) {
  switch (direction) {
    case Direction::HostToDevice:
      return cudaMemcpyHostToDevice;
    case Direction::DeviceToHost:
      return cudaMemcpyDeviceToHost;
    case Direction::DeviceToDevice:
      return cudaMemcpyDeviceToDevice;
    case Direction::HostToHost:
      return cudaMemcpyHostToHost;
  }
  return cudaMemcpyDefault;
}

}  // namespace

CudaEvent::CudaEvent(std::shared_ptr<Device> device, int index, const EventOptions& options)
    : Event(std::move(device)), index_(index), timing_(options.timing) {
  unsigned flags = cudaEventDefault;
  if (!options.timing) flags |= cudaEventDisableTiming;
  if (options.blocking) flags |= cudaEventBlockingSync;
  const DeviceGuard guard(index_);
  check(runtime().EventCreateWithFlags(&event_, flags), "cudaEventCreateWithFlags");
}

CudaEvent::~CudaEvent() {
  log_failure(runtime().EventDestroy(event_), "cudaEventDestroy");
}

void CudaEvent::cover(std::shared_ptr<HostFunctions> functions) {
  const FunctionSpan span = functions->covered();
  const std::lock_guard lock(mutex_);
  covered_ = {std::move(functions), span};
}

CudaEvent::Covered CudaEvent::covered() const {
  const std::lock_guard lock(mutex_);
  return covered_;
}

void CudaEvent::do_wait() {
  const Covered covered = this->covered();
  if (!covered.functions) return;
  {
    const DeviceGuard guard(index_);
    check(runtime().EventSynchronize(event_), "cudaEventSynchronize");
  }
  covered.functions->destroy_finished();
  if (const auto failure = covered.functions->failure(covered.span)) {
    std::rethrow_exception(failure);
  }
}

bool CudaEvent::do_done() {
  if (!covered().functions) return true;
  const DeviceGuard guard(index_);
  return is_over(runtime().EventQuery(event_), "cudaEventQuery");
}

double CudaEvent::do_seconds_since(Event& begin) {
  auto& first = static_cast<CudaEvent&>(begin);
  PAGODA_REQUIRE(timing_ && first.timing_, "an event was made without timing");
  float milliseconds = 0;
  const DeviceGuard guard(index_);
  check(runtime().EventElapsedTime(&milliseconds, first.event_, event_), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

CudaStream::CudaStream(std::shared_ptr<Device> device, int index, const StreamOptions& options)
    : Stream(std::move(device), options.name, Ownership::Owned, next_id()),
      index_(index),
      owned_(true),
      functions_(std::make_shared<HostFunctions>(options.name)) {
  const DeviceGuard guard(index_);
  int least = 0;
  int greatest = 0;  // the most urgent, and so the lower number
  check(runtime().DeviceGetStreamPriorityRange(&least, &greatest),
        "cudaDeviceGetStreamPriorityRange");
  check(runtime().StreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                           std::clamp(options.priority, greatest, least)),
        "cudaStreamCreateWithPriority");
}

CudaStream::CudaStream(std::shared_ptr<Device> device, int index, cudaStream_t stream,
                       std::string name, std::uint64_t id)
    : Stream(std::move(device), std::move(name), Ownership::Wrapped, id),
      index_(index),
      owned_(false),
      stream_(stream),
      functions_(std::make_shared<HostFunctions>(this->name())) {}

CudaStream::~CudaStream() {
  try {
    const DeviceGuard guard(index_);
    // A wrapped stream may be gone by now; only work of ours makes us look at it.
    if (owned_ || functions_->pending()) {
      log_failure(runtime().StreamSynchronize(stream_), "cudaStreamSynchronize");
    }
    functions_->destroy_finished();
    if (owned_) log_failure(runtime().StreamDestroy(stream_), "cudaStreamDestroy");
  } catch (const std::exception& error) {
    log::error("device", "a stream was not closed", {{"stream", name()}, {"cause", error.what()}});
  }
}

void CudaStream::do_copy(void* dst, const void* src, Bytes bytes, Direction direction,
                         std::string_view label) {
  const DeviceGuard guard(index_);
  check(runtime().MemcpyAsync(dst, src, bytes, native(direction), stream_), "cudaMemcpyAsync");
  if (trace::on()) {  // when it runs is not known here, only that it was issued
    trace::instant("device", label.empty() ? device::name(direction) : label,
                   {{"bytes", bytes}, {"stream", name()}});
  }
}

void CudaStream::do_fill(void* dst, std::byte value, Bytes bytes, std::string_view) {
  const DeviceGuard guard(index_);
  check(runtime().MemsetAsync(dst, static_cast<int>(value), bytes, stream_), "cudaMemsetAsync");
}

void CudaStream::do_enqueue(std::string_view label, std::function<void()> fn) {
  functions_->destroy_finished();
  const DeviceGuard guard(index_);
  functions_->launch(stream_, label, std::move(fn));
}

void CudaStream::do_record(Event& event) {
  auto& ours = static_cast<CudaEvent&>(event);
  const DeviceGuard guard(index_);
  check(runtime().EventRecord(ours.native(), stream_), "cudaEventRecord");
  ours.cover(functions_);
}

void CudaStream::do_wait(Event& event, OnFailure on_failure) {
  auto& ours = static_cast<CudaEvent&>(event);
  const CudaEvent::Covered covered = ours.covered();
  if (!covered.functions) return;
  const DeviceGuard guard(index_);
  check(runtime().StreamWaitEvent(stream_, ours.native(), cudaEventWaitDefault),
        "cudaStreamWaitEvent");
  if (on_failure == OnFailure::Ignore || covered.functions->succeeded(covered.span)) return;
  // A function that is still to run may fail: look once it is over, in this stream's order.
  functions_->launch(stream_, "inherit failure", [covered] {
    if (const auto failure = covered.functions->failure(covered.span)) {
      std::rethrow_exception(failure);
    }
  });
}

bool CudaStream::capturing() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(runtime().StreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

bool CudaStream::do_idle() {
  const DeviceGuard guard(index_);
  const bool over = is_over(runtime().StreamQuery(stream_), "cudaStreamQuery");
  if (over) functions_->destroy_finished();
  return over;
}

void CudaStream::do_drain() {
  {
    const DeviceGuard guard(index_);
    check(runtime().StreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  functions_->destroy_finished();
}

void CudaStream::do_rethrow() {
  if (const std::exception_ptr failure = functions_->take_failure()) {
    std::rethrow_exception(failure);
  }
}

}  // namespace pagoda::device::cuda

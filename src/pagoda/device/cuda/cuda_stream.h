// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/cuda/host_functions.h"
#include "pagoda/device/cuda/runtime.h"
#include "pagoda/device/event.h"
#include "pagoda/device/stream.h"

namespace pagoda::device::cuda {

/// A cudaEvent_t, with what tells whether a host function before it failed.
class CudaEvent final : public Event {
 public:
  CudaEvent(std::shared_ptr<Device> device, int index, const EventOptions& options);
  ~CudaEvent() override;

  cudaEvent_t native() const noexcept { return event_; }
  /// Recorded after these functions.
  void cover(std::shared_ptr<HostFunctions> functions);

  struct Covered {
    std::shared_ptr<HostFunctions> functions;  // null: never recorded
    FunctionSpan span;
  };
  Covered covered() const;

 private:
  void do_wait() override;
  bool do_done() override;
  double do_seconds_since(Event& begin) override;

  const int index_;
  const bool timing_;
  cudaEvent_t event_ = nullptr;
  mutable RankedMutex<LockRank::CudaStream> mutex_;
  Covered covered_;  // guarded by mutex_
};

/// A cudaStream_t, made by us (non-blocking) or wrapped.
class CudaStream final : public Stream {
 public:
  /// Makes a stream of its own.
  CudaStream(std::shared_ptr<Device> device, int index, const StreamOptions& options);
  /// Wraps one; `id` is the same for every wrapper of it.
  CudaStream(std::shared_ptr<Device> device, int index, cudaStream_t stream, std::string name,
             std::uint64_t id);
  ~CudaStream() override;

  bool capturing() const override;

  /// An id for a native stream that is wrapped for the first time.
  static std::uint64_t wrapped_id() { return next_id(); }

 private:
  void* do_native_handle() const noexcept override { return stream_; }
  void do_copy(void* dst, const void* src, Bytes bytes, Direction direction,
               std::string_view label) override;
  void do_fill(void* dst, std::byte value, Bytes bytes, std::string_view label) override;
  void do_enqueue(std::string_view label, std::function<void()> fn) override;
  void do_record(Event& event) override;
  void do_wait(Event& event, OnFailure on_failure) override;
  bool do_idle() override;
  void do_drain() override;
  void do_rethrow() override;

  const int index_;
  const bool owned_;
  cudaStream_t stream_ = nullptr;
  const std::shared_ptr<HostFunctions> functions_;
};

}  // namespace pagoda::device::cuda

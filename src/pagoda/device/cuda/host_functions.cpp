// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/cuda/host_functions.h"

#include <utility>

#include "pagoda/base/clock.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"

namespace pagoda::device::cuda {

struct HostFunctions::Call {
  std::shared_ptr<HostFunctions> functions;
  std::uint64_t number = 0;
  std::string label;
  std::function<void()> fn;
};

HostFunctions::HostFunctions(std::string stream) : stream_(std::move(stream)) {}

HostFunctions::~HostFunctions() {
  if (failure({taken_, launched_})) {
    log::error("device", "a failure was never looked at", {{"stream", stream_}});
  }
}

void HostFunctions::launch(cudaStream_t stream, std::string_view label, std::function<void()> fn) {
  auto call = std::make_unique<Call>();
  call->functions = shared_from_this();
  call->label = label;
  call->fn = std::move(fn);
  {
    const Lock lock(mutex_);
    call->number = ++launched_;
  }
  const cudaError_t code = runtime().LaunchHostFunc(stream, &HostFunctions::run, call.get());
  if (code != cudaSuccess) {
    const Lock lock(mutex_);
    --launched_;
  }
  check(code, "cudaLaunchHostFunc");
  call.release();  // run() has it now
}

void CUDART_CB HostFunctions::run(void* data) {
  std::unique_ptr<Call> call(static_cast<Call*>(data));
  const std::shared_ptr<HostFunctions> self = std::move(call->functions);
  bool stopped = false;
  {
    const Lock lock(self->mutex_);
    stopped = self->failure({self->taken_, call->number}, lock) != nullptr;
  }
  std::exception_ptr error;
  if (!stopped) {
    const Nanos begin = now_ns();
    try {
      call->fn();
    } catch (...) {
      error = std::current_exception();
    }
    if (trace::on()) {
      trace::slice("device", call->label, begin, now_ns(), {}, self->stream_);
    }
  }
  const Lock lock(self->mutex_);
  if (error) self->failures_.push_back({call->number, std::move(error)});
  ++self->finished_;
  self->dead_.push_back(std::move(call));
}

FunctionSpan HostFunctions::covered() const {
  const Lock lock(mutex_);
  return {taken_, launched_};
}

bool HostFunctions::succeeded(FunctionSpan span) const {
  const Lock lock(mutex_);
  return finished_ >= span.until && failure(span, lock) == nullptr;
}

std::exception_ptr HostFunctions::failure(FunctionSpan span) const {
  const Lock lock(mutex_);
  return failure(span, lock);
}

std::exception_ptr HostFunctions::failure(FunctionSpan span, const Lock&) const {
  for (const Failure& failure : failures_) {
    if (failure.number > span.since && failure.number <= span.until) return failure.error;
  }
  return nullptr;
}

std::exception_ptr HostFunctions::take_failure() {
  const Lock lock(mutex_);
  std::exception_ptr error = failure({taken_, finished_}, lock);
  if (error) taken_ = finished_;
  return error;
}

bool HostFunctions::pending() const {
  const Lock lock(mutex_);
  return finished_ < launched_;
}

void HostFunctions::destroy_finished() {
  std::vector<std::unique_ptr<Call>> dead;  // destroyed without the lock: they may call us
  const Lock lock(mutex_);
  dead.swap(dead_);
}

}  // namespace pagoda::device::cuda

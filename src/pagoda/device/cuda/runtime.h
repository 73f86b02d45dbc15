// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <source_location>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

/// The CUDA runtime as a table of functions, found at run time.
namespace pagoda::device::cuda {

// clang-format off
#define PAGODA_CUDA_FUNCTIONS(X)                                                          \
  X(DeviceGetAttribute) X(DeviceGetStreamPriorityRange) X(EventCreateWithFlags)           \
  X(EventDestroy) X(EventElapsedTime) X(EventQuery) X(EventRecord) X(EventSynchronize)    \
  X(Free) X(FreeHost) X(GetDevice) X(GetDeviceCount) X(GetDeviceProperties)               \
  X(GetErrorName) X(GetErrorString) X(GetLastError) X(HostRegister) X(HostUnregister)     \
  X(LaunchHostFunc) X(Malloc) X(MallocHost) X(MemGetInfo) X(MemcpyAsync) X(MemsetAsync)   \
  X(SetDevice) X(StreamCreateWithPriority) X(StreamDestroy) X(StreamIsCapturing)          \
  X(StreamQuery) X(StreamSynchronize) X(StreamWaitEvent)
// clang-format on

/// The functions this backend calls, named as in the runtime. Filled once, then constant.
struct Runtime {
#define PAGODA_CUDA_MEMBER(Name) decltype(&::cuda##Name) Name = nullptr;
  PAGODA_CUDA_FUNCTIONS(PAGODA_CUDA_MEMBER)
#undef PAGODA_CUDA_MEMBER

  /// The driver's cuDevicePrimaryCtxGetState; null where it cannot be had.
  int (*PrimaryContextState)(int device, unsigned* flags, int* active) = nullptr;
};

/// The runtime, loaded at the first call. UserError "CUDA is not available: …" with all that was
/// tried. May be called from any thread.
const Runtime& runtime();

/// Throws EngineError with the call, the error's name and its text. Also clears the runtime's
/// record of the last error, so that nobody (torch) mistakes it for their own.
void check(cudaError_t code, std::string_view call,
           std::source_location where = std::source_location::current());

/// For destructors, which cannot throw: logs what check() would have thrown, unless the process is
/// ending and the runtime with it.
void log_failure(cudaError_t code, std::string_view call) noexcept;

/// Makes a device current for this thread while it lives. Threads differ in theirs, so every call
/// that depends on it has one.
///
/// The former device becomes current again only if it has a context: making it current would
/// otherwise create one, at the cost of hundreds of megabytes on a GPU this process does not use.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  int previous_ = -1;  // -1: nothing to restore
};

}  // namespace pagoda::device::cuda

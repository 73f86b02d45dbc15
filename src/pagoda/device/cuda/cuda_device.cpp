// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/cuda/cuda_device.h"

#include <map>
#include <mutex>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/cuda/cuda_stream.h"
#include "pagoda/device/cuda/runtime.h"
#include "pagoda/device/host_pages.h"

namespace pagoda::device::cuda {
namespace {

/// Memory on the GPU.
class DeviceBytes {
 public:
  DeviceBytes(int index, Bytes bytes) {
    const DeviceGuard guard(index);
    const cudaError_t code = runtime().Malloc(&data_, bytes);
    if (code == cudaErrorMemoryAllocation) {
      runtime().GetLastError();
      std::size_t free = 0;
      std::size_t total = 0;
      check(runtime().MemGetInfo(&free, &total), "cudaMemGetInfo");
      throw EngineError(fmt::format("out of device memory: {} wanted, {} of {} free",
                                    format_bytes(bytes), format_bytes(free), format_bytes(total)));
    }
    check(code, "cudaMalloc");
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  // A pointer says which device it is on, so the current one does not matter.
  ~DeviceBytes() { log_failure(runtime().Free(data_), "cudaFree"); }

  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Pages of the host, locked and known to every GPU.
class RegisteredPages {
 public:
  RegisteredPages(int index, Bytes bytes, ThreadPool* touchers)
      : pages_(bytes, HostPages::Touch::Now, touchers) {
    const DeviceGuard guard(index);
    const cudaError_t code = runtime().HostRegister(
        pages_.data(), pages_.mapped(), cudaHostRegisterPortable | cudaHostRegisterMapped);
    check(code, fmt::format("cudaHostRegister of {}", format_bytes(bytes)));
  }
  RegisteredPages(const RegisteredPages&) = delete;
  RegisteredPages& operator=(const RegisteredPages&) = delete;
  ~RegisteredPages() { log_failure(runtime().HostUnregister(pages_.data()), "cudaHostUnregister"); }

  std::byte* data() const noexcept { return pages_.data(); }

 private:
  HostPages pages_;
};

std::string gpu_name(int index) {
  const Runtime& cuda = runtime();  // says why, where there is none
  const int count = device_count();
  PAGODA_REQUIRE(index >= 0 && index < count, "there is no GPU {}: this machine shows {}", index,
                 count);
  cudaDeviceProp properties{};
  check(cuda.GetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return fmt::format("cuda:{} ({})", index, properties.name);
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(Options options)
      : Device(DeviceKind::Cuda, gpu_name(options.index), std::move(options.checker)),
        index_(options.index) {}

  MemoryInfo memory_info() const override {
    const DeviceGuard guard(index_);
    std::size_t free = 0;
    std::size_t total = 0;
    check(runtime().MemGetInfo(&free, &total), "cudaMemGetInfo");
    return {free, total};
  }
  bool reads_pinned_memory() const override {
    int yes = 0;
    check(runtime().DeviceGetAttribute(&yes, cudaDevAttrCanUseHostPointerForRegisteredMem, index_),
          "cudaDeviceGetAttribute");
    return yes != 0;
  }

 private:
  std::shared_ptr<Stream> do_make_stream(const StreamOptions& options) override {
    return std::make_shared<CudaStream>(shared_from_this(), index_, options);
  }
  std::shared_ptr<Stream> do_wrap_stream(void* native, std::string name) override {
    std::uint64_t id = 0;
    {
      const std::lock_guard lock(mutex_);
      auto& known = wrapped_[native];
      if (known == 0) known = CudaStream::wrapped_id();
      id = known;
    }
    return std::make_shared<CudaStream>(shared_from_this(), index_,
                                        static_cast<cudaStream_t>(native), std::move(name), id);
  }
  std::shared_ptr<Event> do_make_event(const EventOptions& options) override {
    return std::make_shared<CudaEvent>(shared_from_this(), index_, options);
  }
  std::unique_ptr<Memory> do_allocate(MemoryKind kind, Bytes bytes,
                                      const MemoryOptions& options) override {
    if (kind == MemoryKind::Device) {
      auto owner = std::make_shared<DeviceBytes>(index_, bytes);
      std::byte* data = owner->data();
      return std::make_unique<Memory>(kind, data, bytes, std::move(owner));
    }
    auto owner = std::make_shared<RegisteredPages>(index_, bytes, options.touchers);
    std::byte* data = owner->data();
    return std::make_unique<Memory>(kind, data, bytes, std::move(owner));
  }

  const int index_;
  RankedMutex<LockRank::CudaPages> mutex_;
  std::map<void*, std::uint64_t> wrapped_;  // guarded by mutex_: ids of native streams
};

}  // namespace

std::shared_ptr<Device> make_device(Options options) {
  return std::make_shared<CudaDevice>(std::move(options));
}

}  // namespace pagoda::device::cuda

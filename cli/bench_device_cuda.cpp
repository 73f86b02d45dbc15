// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "bench_device.h"
#include "pagoda/base/clock.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/cuda/cuda_device.h"
#include "pagoda/device/cuda/runtime.h"
#include "pagoda/device/pinned_arena.h"

namespace pagoda::cli {
namespace {

using device::Direction;
using device::Stream;
using device::cuda::check;
using device::cuda::runtime;

constexpr int kRounds = 5;
constexpr int kCopies = 4;  // a round

/// Bytes a nanosecond of `body`, which moves `bytes`; the best round, after one that warms up.
template <class Body>
double best_rate(Bytes bytes, const Body& body) {
  double best = 0;
  for (int round = 0; round <= kRounds; ++round) {
    const Stopwatch watch;
    body();
    if (round > 0) {
      best = std::max(best, static_cast<double>(bytes) / static_cast<double>(watch.elapsed_ns()));
    }
  }
  return best;
}

/// The same copies with nothing but the runtime.
class Raw {
 public:
  Raw() {
    for (cudaStream_t& stream : streams_) {
      check(runtime().StreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0),
            "cudaStreamCreateWithPriority");
    }
  }
  ~Raw() {
    for (const cudaStream_t stream : streams_) runtime().StreamDestroy(stream);
  }

  void copy(int stream, void* dst, const void* src, Bytes bytes, cudaMemcpyKind kind) {
    check(runtime().MemcpyAsync(dst, src, bytes, kind, streams_[stream]), "cudaMemcpyAsync");
  }
  void synchronize() {
    for (const cudaStream_t stream : streams_) {
      check(runtime().StreamSynchronize(stream), "cudaStreamSynchronize");
    }
  }

 private:
  cudaStream_t streams_[2] = {};
};

void bench_copies(BenchReport& report, const std::shared_ptr<device::Device>& gpu, Bytes bytes) {
  const auto memory = gpu->allocate(device::MemoryKind::Device, 2 * bytes);
  const auto pinned = gpu->allocate(device::MemoryKind::Pinned, 2 * bytes);
  const auto up = gpu->make_stream({.name = "up"});
  const auto down = gpu->make_stream({.name = "down"});
  Raw raw;
  const auto row = [&](const char* name, bool h2d, bool d2h) {
    const Bytes moved = bytes * kCopies * (h2d && d2h ? 2 : 1);
    const double ours = best_rate(moved, [&] {
      for (int i = 0; i < kCopies; ++i) {
        if (h2d) {
          up->copy_async(memory->data(), pinned->data(), bytes, Direction::HostToDevice);
        }
        if (d2h) {
          down->copy_async(pinned->data() + bytes, memory->data() + bytes, bytes,
                           Direction::DeviceToHost);
        }
      }
      gpu->synchronize();
    });
    const double bare = best_rate(moved, [&] {
      for (int i = 0; i < kCopies; ++i) {
        if (h2d) raw.copy(0, memory->data(), pinned->data(), bytes, cudaMemcpyHostToDevice);
        if (d2h) {
          raw.copy(1, pinned->data() + bytes, memory->data() + bytes, bytes,
                   cudaMemcpyDeviceToHost);
        }
      }
      raw.synchronize();
    });
    report.add({fmt::format("cuda: {} of {}", name, format_bytes(bytes)), ours, "GB/s", bare,
                "bare cudaMemcpyAsync"});
  };
  row("h2d", true, false);
  row("d2h", false, true);
  row("both ways", true, true);
}

void bench_issue(BenchReport& report, const std::shared_ptr<device::Device>& gpu) {
  constexpr int kSmall = 2000;
  const auto memory = gpu->allocate(device::MemoryKind::Device, 4_KiB);
  const auto pinned = gpu->allocate(device::MemoryKind::Pinned, 4_KiB);
  const auto stream = gpu->make_stream({.name = "small"});
  Raw raw;
  const double ours = best_rate(kSmall, [&] {
    for (int i = 0; i < kSmall; ++i) {
      stream->copy_async(memory->data(), pinned->data(), 4_KiB, Direction::HostToDevice);
    }
    stream->synchronize();
  });
  const double bare = best_rate(kSmall, [&] {
    for (int i = 0; i < kSmall; ++i) {
      raw.copy(0, memory->data(), pinned->data(), 4_KiB, cudaMemcpyHostToDevice);
    }
    raw.synchronize();
  });
  report.add(
      {"cuda: 4 KiB copies issued", ours * 1e6, "thousand/s", bare * 1e6, "bare cudaMemcpyAsync"});
  Budget budget("bench", 1_GiB);
  device::Arena arena(gpu, budget.reserve(64_MiB, "arena"));
  const auto other = gpu->make_stream({.name = "other"});
  bool odd = false;
  const double taken = best_rate(kSmall, [&] {
    for (int i = 0; i < kSmall; ++i) {
      odd = !odd;
      arena.allocate(64_KiB, odd ? *stream : *other);
    }
  });
  report.add({"cuda: allocate + free, two streams in turn", 1 / taken, "ns", allocation_ns(),
              "malloc and free"});
  gpu->synchronize();
}

void bench_pinned(BenchReport& report, const std::shared_ptr<device::Device>& gpu, Bytes bytes) {
  Budget budget("bench", bytes);
  const auto gigabytes = [&](const Stopwatch& watch) {
    return static_cast<double>(bytes) * 1e-9 / watch.seconds();
  };
  double ours = 0;
  {
    const Stopwatch watch;
    const device::PinnedArena arena(gpu, budget.reserve(bytes, "pinned"));
    ours = gigabytes(watch);
  }
  void* data = nullptr;
  const Stopwatch watch;
  check(runtime().MallocHost(&data, bytes), "cudaMallocHost");
  const double bare = gigabytes(watch);
  check(runtime().FreeHost(data), "cudaFreeHost");
  report.add({fmt::format("cuda: pinned arena of {} set up", format_bytes(bytes)), ours, "GB/s",
              bare, "cudaMallocHost"});
}

}  // namespace

void bench_cuda(BenchReport& report, Bytes copy_bytes, Bytes pinned_bytes) {
  std::string why;
  if (!device::cuda::available(&why)) {
    report.note("CUDA is not available: " + why);
    return;
  }
  const auto gpu = device::cuda::make_device({.checker = nullptr});
  report.note("GPU: " + gpu->name());
  bench_copies(report, gpu, copy_bytes);
  bench_issue(report, gpu);
  bench_pinned(report, gpu, pinned_bytes);
}

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
// pagoda_bench_device [COPY_BYTES [PINNED_BYTES]]: what the device layer costs, beside what it
// stands on.
#include "device_bench.h"

#include <cstdio>
#include <cstring>
#include <random>

#include <fmt/format.h>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/clock.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"

namespace pagoda::bench {
namespace {

using device::Arena;
using device::Block;
using device::Device;
using device::OrderingChecker;

/// Nanoseconds a call of `body`, the best of a few rounds.
template <class Body>
double best_ns(int calls, const Body& body) {
  double best = 1e300;
  for (int round = 0; round < 5; ++round) {
    const Stopwatch watch;
    for (int i = 0; i < calls; ++i) body();
    best = std::min(best, static_cast<double>(watch.elapsed_ns()) / calls);
  }
  return best;
}

/// Allocation and free of a block in an arena that many others share.
void bench_arena(cli::BenchReport& report, const char* name,
                 const std::shared_ptr<Device>& device) {
  Budget budget("bench", 1_GiB);
  Arena arena(device, budget.reserve(256_MiB, "arena"));
  const auto stream = device->make_stream({.name = "one"});
  const auto other = device->make_stream({.name = "two"});
  std::mt19937 random(1);
  std::vector<Block> blocks;
  for (int i = 0; i < 1000; ++i) blocks.push_back(arena.allocate(random() % 200'000, *stream));
  for (std::size_t i = 0; i < blocks.size(); i += 2) blocks[i] = Block();
  stream->synchronize();
  report.add({fmt::format("allocate + free, {}, one stream", name),
              best_ns(10'000, [&] { arena.allocate(64_KiB, *stream); }), "ns", 0, ""});
  bool odd = false;
  report.add({fmt::format("allocate + free, {}, two streams in turn", name),
              best_ns(2'000,
                      [&] {
                        odd = !odd;
                        arena.allocate(64_KiB, odd ? *stream : *other);
                      }),
              "ns", 0, ""});
  device->synchronize();
}

void bench_emulated(cli::BenchReport& report) {
  const auto device = device::emulated::make_device({.checker = nullptr});
  const auto stream = device->make_stream({.name = "copies"});
  report.add({"emulated: function issued and waited for",
              best_ns(1'000,
                      [&] {
                        stream->enqueue("nothing", [] {});
                        stream->synchronize();
                      }) *
                  1e-3,
              "µs", 0, ""});
  constexpr Bytes kBytes = 16_MiB;
  const auto memory = device->allocate(device::MemoryKind::Device, kBytes);
  const auto pinned = device->allocate(device::MemoryKind::Pinned, kBytes);
  const double plain = best_ns(10, [&] { std::memcpy(memory->data(), pinned->data(), kBytes); });
  const double copied = best_ns(10, [&] {
    stream->copy_async(memory->data(), pinned->data(), kBytes, device::Direction::HostToDevice);
    stream->synchronize();
  });
  report.add(
      {"emulated: 16 MiB copies, no set speed", kBytes / copied, "GB/s", kBytes / plain, "memcpy"});
  const auto paced = device::emulated::make_device(
      {.host_to_device = {.bytes_per_second = 1e9}, .checker = nullptr});
  const auto slow = paced->make_stream({.name = "paced"});
  const double timed = best_ns(3, [&] {
    slow->copy_async(memory->data(), pinned->data(), kBytes, device::Direction::HostToDevice);
    slow->synchronize();
  });
  report.add({"emulated: 16 MiB copies, set to 1 GB/s", kBytes / timed, "GB/s", 1, "what was set"});
}

int run(int argc, char** argv) {
  const Bytes copy_bytes = argc > 1 ? parse_bytes(argv[1]) : 1_GiB;
  const Bytes pinned_bytes = argc > 2 ? parse_bytes(argv[2]) : 8_GiB;
  cli::BenchReport report("device layer");
  bench_arena(report, "host", device::host::make_device({.checker = nullptr}));
  bench_arena(report, "host with checker",
              device::host::make_device({.checker = std::make_shared<OrderingChecker>()}));
  bench_arena(report, "emulated", device::emulated::make_device({.checker = nullptr}));
  bench_emulated(report);
  bench_cuda(report, copy_bytes, pinned_bytes);
  std::fputs(report.table().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace pagoda::bench

int main(int argc, char** argv) {
  try {
    return pagoda::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pagoda_bench_device: %s\n", error.what());
    return 1;
  }
}

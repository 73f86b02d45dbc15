// SPDX-License-Identifier: Apache-2.0
#include "bench_device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <semaphore>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "commands.h"
#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/clock.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"

namespace pagoda::cli {
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
void bench_arena(BenchReport& report, const char* name, const std::shared_ptr<Device>& device) {
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
              best_ns(10'000, [&] { arena.allocate(64_KiB, *stream); }), "ns", allocation_ns(),
              "malloc and free"});
  bool odd = false;
  report.add({fmt::format("allocate + free, {}, two streams in turn", name),
              best_ns(2'000,
                      [&] {
                        odd = !odd;
                        arena.allocate(64_KiB, odd ? *stream : *other);
                      }),
              "ns", allocation_ns(), "malloc and free"});
  device->synchronize();
}

/// Waking a thread that sleeps, and being woken by it.
double hand_over_ns() {
  std::binary_semaphore there(0);
  std::binary_semaphore back(0);
  constexpr int kCalls = 1'000;
  std::jthread other([&] {
    for (int i = 0; i < 5 * kCalls; ++i) {
      there.acquire();
      back.release();
    }
  });
  return best_ns(kCalls, [&] {
    there.release();
    back.acquire();
  });
}

void bench_emulated(BenchReport& report) {
  const auto device = device::emulated::make_device({.checker = nullptr});
  const auto stream = device->make_stream({.name = "copies"});
  report.add({"emulated: function issued and waited for",
              best_ns(1'000,
                      [&] {
                        stream->enqueue("nothing", [] {});
                        stream->synchronize();
                      }) *
                  1e-3,
              "µs", hand_over_ns() * 1e-3, "a thread woken, and waking back"});
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

struct DeviceFlags {
  std::string copy = "1GiB";
  std::string pinned = "8GiB";
  bool json = false;
};

BenchReport run_device(const DeviceFlags& flags) {
  const Bytes copy_bytes = parse_bytes(flags.copy);
  const Bytes pinned_bytes = parse_bytes(flags.pinned);
  BenchReport report("The device layer beside what it stands on (ns and µs: lower is better)");
  bench_arena(report, "host", device::host::make_device({.checker = nullptr}));
  bench_arena(report, "host with checker",
              device::host::make_device({.checker = std::make_shared<OrderingChecker>()}));
  bench_arena(report, "emulated", device::emulated::make_device({.checker = nullptr}));
  bench_emulated(report);
  bench_cuda(report, copy_bytes, pinned_bytes);
  return report;
}

}  // namespace

double allocation_ns() {
  return best_ns(100'000, [] {
    void* volatile memory = std::malloc(64_KiB);  // volatile, or the pair is optimised away
    std::free(memory);
  });
}

void add_bench_device(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "device", "Arenas, the emulated device and, where there is one, the GPU's copies");
  auto flags = std::make_shared<DeviceFlags>();
  command->add_option("--copy", flags->copy, "Bytes of a copy to or from the GPU")
      ->capture_default_str();
  command->add_option("--pinned", flags->pinned, "Bytes of the pinned arena that is set up")
      ->capture_default_str();
  command->add_flag("--json", flags->json, "One JSON object instead of a table");
  command->callback([flags] {
    const BenchReport report = run_device(*flags);
    std::fputs((flags->json ? report.json() + "\n" : report.table()).c_str(), stdout);
  });
}

}  // namespace pagoda::cli

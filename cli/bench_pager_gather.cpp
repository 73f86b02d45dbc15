// SPDX-License-Identifier: Apache-2.0
// One page to every rank, from a shard on each rank and from one owner. Every rank has a link of
// its own between host and device, and that is the slow one.
#include <memory>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "bench_pager.h"
#include "pagoda/base/bytes.h"
#include "pagoda/base/clock.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::cli {
namespace {

constexpr std::uint64_t kBytes = 8_MiB;
constexpr double kHostLink = 0.125e9;  // bytes a second from host to device
constexpr double kRankLink = 2e9;      // …and from rank to rank

enum class Layout { Sharded, OwnerBroadcast };

/// Every rank's device ends up with the page; seconds until the last has it, the middle of
/// `rounds`.
double gather_seconds(int ranks, Layout layout, std::size_t rounds) {
  const std::vector<comm::LinkSpeed> links(static_cast<std::size_t>(ranks), {kRankLink, 0});
  const auto worlds = comm::make_thread_worlds(ranks, links);
  std::vector<double> slowest(rounds);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = worlds[static_cast<std::size_t>(rank)]->make_group("gather");
      device::emulated::Options options;
      options.host_to_device.bytes_per_second = kHostLink;
      options.checker = nullptr;
      const auto device = device::emulated::make_device(options);
      const auto stream = device->make_stream({.name = "in"});
      const auto page = device->allocate(device::MemoryKind::Device, kBytes);
      const auto home = device->allocate(device::MemoryKind::Pinned, kBytes);
      std::vector<std::span<std::byte>> parts;
      for (int r = 0; r < ranks; ++r) {
        const pager::Range range = pager::Sharding{ranks}.of(kBytes, r);
        parts.emplace_back(page->data() + range.begin, range.size());
      }
      for (std::size_t round = 0; round < rounds; ++round) {
        group->barrier();
        const Stopwatch watch;
        const std::span<std::byte> mine = parts[static_cast<std::size_t>(rank)];
        const bool all = layout == Layout::OwnerBroadcast;
        if (!all || rank == 0) {
          stream->copy_async(all ? page->data() : mine.data(), home->data(),
                             all ? kBytes : mine.size(), device::Direction::HostToDevice);
          stream->synchronize();
        }
        if (all) {
          group->broadcast({page->data(), kBytes}, 0);
        } else {
          group->all_gather(mine, parts);
        }
        group->barrier();
        if (rank == 0) slowest[round] = watch.seconds();
      }
    });
  }
  threads.clear();
  return median(slowest);
}

}  // namespace

void bench_gather(BenchReport& report, std::size_t rounds) {
  const double alone = gather_seconds(1, Layout::Sharded, rounds);
  for (const Layout layout : {Layout::Sharded, Layout::OwnerBroadcast}) {
    for (const int ranks : {1, 2, 4}) {
      report.add({fmt::format("gather, {}, {} rank{}",
                              layout == Layout::Sharded ? "sharded" : "owner broadcast", ranks,
                              ranks == 1 ? "" : "s"),
                  1e3 * gather_seconds(ranks, layout, rounds), "ms", 1e3 * alone,
                  "one rank alone (sharded falls with the ranks)"});
    }
  }
  report.note(fmt::format(
      "Gather: a page of {} to the device of every rank; {:.3f} GB/s from each rank's host to its "
      "device, {:.0f} GB/s from each rank to the others, emulated.",
      format_bytes(kBytes), kHostLink * 1e-9, kRankLink * 1e-9));
}

}  // namespace pagoda::cli

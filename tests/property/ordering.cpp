// SPDX-License-Identifier: Apache-2.0
// Every event of a correct pipeline is needed, and the checker says so for each one that is
// dropped; and on random programs it agrees with reachability in the graph of what was issued.
#include <array>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/budget.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/device/pinned_arena.h"

namespace pagoda::device {
namespace {

using MakeDevice = std::shared_ptr<Device> (*)(std::shared_ptr<OrderingChecker>);
constexpr std::array<MakeDevice, 2> kDevices = {
    [](std::shared_ptr<OrderingChecker> c) { return host::make_device({.checker = c}); },
    [](std::shared_ptr<OrderingChecker> c) { return emulated::make_device({.checker = c}); }};

/// Pages go up, are worked on and come back, through few buffers. `drop` leaves out one record or
/// wait, counted in order; returns how many there are.
struct Pipeline {
  MakeDevice make;
  int pages;
  int slots;
  Bytes bytes;

  int run(int drop) const {
    auto checker = std::make_shared<OrderingChecker>();
    const auto device = make(checker);
    const auto up = device->make_stream({.name = "up"});
    const auto compute = device->make_stream({.name = "compute"});
    const auto down = device->make_stream({.name = "down"});
    Budget budget("test", 64_MiB);
    Arena arena(device, budget.reserve(1_MiB, "device"));
    PinnedArena pinned(device, budget.reserve(1_MiB, "pinned"));
    struct Slot {
      Block in, page, out;
      std::shared_ptr<Event> loaded, computed, stored;
    };
    std::vector<Slot> buffers;
    for (int s = 0; s < slots; ++s) {
      buffers.push_back({pinned.allocate(bytes), arena.allocate(bytes, *up), pinned.allocate(bytes),
                         device->make_event(), device->make_event(), device->make_event()});
      buffers.back().page.touch(*compute);
      buffers.back().page.touch(*down);
      buffers.back().in.touch(*up);
      buffers.back().out.touch(*down);
    }
    int count = 0;
    const auto event = [&](const std::function<void()>& call) {
      if (count++ != drop) call();
    };
    try {
      for (int i = 0; i < pages + slots; ++i) {
        Slot& slot = buffers[static_cast<std::size_t>(i % slots)];
        const bool reused = i >= slots;
        if (i < pages) {
          if (reused) event([&] { slot.loaded->wait(); });
          checker->host_write(slot.in.data(), bytes, "fill");
          if (reused) event([&] { up->wait(*slot.stored); });
          up->copy_async(slot.page.data(), slot.in.data(), bytes, Direction::HostToDevice);
          event([&] { up->record(*slot.loaded); });
          event([&] { compute->wait(*slot.loaded); });
          compute->enqueue(
              "kernel", [] {},
              {Use::reads(slot.page.data(), bytes), Use::writes(slot.page.data(), bytes)});
          event([&] { compute->record(*slot.computed); });
        }
        if (reused) {
          event([&] { slot.stored->wait(); });
          checker->host_read(slot.out.data(), bytes, "result");
        }
        if (i < pages) {
          event([&] { down->wait(*slot.computed); });
          down->copy_async(slot.out.data(), slot.page.data(), bytes, Direction::DeviceToHost);
          event([&] { down->record(*slot.stored); });
        }
      }
    } catch (...) {
      device->synchronize();
      checker->take_violations();
      throw;
    }
    device->synchronize();
    checker->check();
    return count;
  }
};

TEST(Ordering, EveryDroppedEventIsCaught) {
  std::mt19937 random(1);
  int dropped = 0;
  for (const MakeDevice make : kDevices) {
    for (int round = 0; round < 6; ++round) {
      const int slots = 1 + round % 3;
      const Pipeline pipeline{make, slots + 1 + static_cast<int>(random() % 4), slots,
                              1 + random() % 5000};
      int events = 0;
      ASSERT_NO_THROW(events = pipeline.run(-1));
      for (int drop = 0; drop < events; ++drop, ++dropped) {
        EXPECT_THROW(pipeline.run(drop), OrderingViolation)
            << "event " << drop << " of " << events << ", " << pipeline.pages << " pages, " << slots
            << " slots";
      }
    }
  }
  EXPECT_GT(dropped, 200);
}

/// The same question answered without clocks: a graph of all operations, searched.
class Graph {
 public:
  int add() {
    edges_.emplace_back();
    return static_cast<int>(edges_.size()) - 1;
  }
  void edge(int from, int to) {
    if (from >= 0) edges_[static_cast<std::size_t>(to)].push_back(from);
  }
  bool reaches(int from, int to) const {
    if (from == to) return true;
    for (const int before : edges_[static_cast<std::size_t>(to)]) {
      if (before >= from && reaches(from, before)) return true;
    }
    return false;
  }

 private:
  std::vector<std::vector<int>> edges_;  // incoming; a node's are all lower
};

TEST(Ordering, AgreesWithReachabilityOnRandomPrograms) {
  constexpr int kStreams = 3;
  constexpr int kEvents = 4;
  constexpr int kBuffers = 3;
  constexpr Bytes kBytes = 64;
  std::mt19937 random(2);
  int violations = 0;
  int clean = 0;
  for (int program = 0; program < 600; ++program) {
    auto checker = std::make_shared<OrderingChecker>();
    const auto device = host::make_device({.checker = checker});
    const auto memory = device->allocate(MemoryKind::Device, kBuffers * kBytes, {.name = "m"});
    std::vector<std::shared_ptr<Stream>> streams;
    std::vector<std::shared_ptr<Event>> events;
    for (int i = 0; i < kStreams; ++i) streams.push_back(device->make_stream());
    for (int i = 0; i < kEvents; ++i) events.push_back(device->make_event());

    Graph graph;
    std::array<int, kStreams> last;  // the stream's last operation
    std::array<int, kEvents> recorded;
    last.fill(-1);
    recorded.fill(-1);
    int host = graph.add();
    struct Seen {
      int node;
      bool wrote;
      Bytes begin, end;
    };
    std::vector<Seen> seen;
    for (int step = 0; step < 14; ++step) {
      const std::size_t s = random() % kStreams;
      const std::size_t e = random() % kEvents;
      const int node = graph.add();
      graph.edge(host, node);  // issued after all the host knew
      graph.edge(last[s], node);
      const auto kind = random() % 10;
      if (kind < 2) {
        streams[s]->record(*events[e]);
        recorded[e] = last[s] = node;
      } else if (kind < 5) {
        streams[s]->wait(*events[e]);
        graph.edge(recorded[e], node);
        last[s] = node;
      } else if (kind == 5) {
        events[e]->wait();  // the host learns it; the stream is not involved
        const int learnt = graph.add();
        graph.edge(host, learnt);
        graph.edge(recorded[e], learnt);
        host = learnt;
      } else {
        const bool writes = kind < 8;
        const Bytes begin = random() % (kBuffers * kBytes - 1);
        const Bytes end = std::min<Bytes>(kBuffers * kBytes, begin + 1 + random() % kBytes);
        last[s] = node;
        bool expected = false;
        for (const Seen& other : seen) {
          const bool meets = other.begin < end && begin < other.end && (writes || other.wrote);
          if (meets && !graph.reaches(other.node, node)) expected = true;
        }
        bool found = false;
        try {
          if (writes) {
            checker->write(*streams[s], memory->data() + begin, end - begin, "kernel");
          } else {
            checker->read(*streams[s], memory->data() + begin, end - begin, "kernel");
          }
        } catch (const OrderingViolation&) {
          found = true;
        }
        ASSERT_EQ(found, expected) << "program " << program << ", step " << step;
        seen.push_back({node, writes, begin, end});
        if (found) {
          ++violations;
          break;
        }
      }
      if (step == 13) ++clean;
    }
    checker->take_violations();
  }
  EXPECT_GT(violations, 50);
  EXPECT_GT(clean, 50);
}

}  // namespace
}  // namespace pagoda::device

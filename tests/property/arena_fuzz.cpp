// SPDX-License-Identifier: Apache-2.0
// Random blocks on several streams, against a model that knows the free bytes one by one and with
// the ordering checker on: blocks never meet, best fit is the model's, contents survive until they
// are read, and when all is freed there is one free range again.
#include <atomic>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/budget.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/device/ordering_checker.h"

namespace pagoda::device {
namespace {

/// Free or not, one entry for each aligned piece of the arena.
class Model {
 public:
  Model(Bytes capacity, Bytes alignment) : alignment_(alignment), used_(capacity / alignment) {}

  std::size_t pieces(Bytes bytes) const {
    return static_cast<std::size_t>(std::max(align_up(bytes, alignment_), alignment_) / alignment_);
  }
  /// Where best fit puts it: the start of the shortest run that is long enough, the first of them.
  std::optional<Bytes> best_fit(Bytes bytes) const {
    std::optional<std::size_t> best;
    std::size_t best_length = used_.size() + 1;
    for (const auto& [start, length] : runs()) {
      if (length >= pieces(bytes) && length < best_length) {
        best = start;
        best_length = length;
      }
    }
    if (!best) return std::nullopt;
    return *best * alignment_;
  }
  void set(Bytes offset, Bytes bytes, bool used) {
    const std::size_t first = static_cast<std::size_t>(offset / alignment_);
    for (std::size_t i = first; i < first + pieces(bytes); ++i) {
      EXPECT_NE(used_[i], used) << "two blocks meet at piece " << i;
      used_[i] = used;
    }
  }
  std::vector<std::pair<std::size_t, std::size_t>> runs() const {
    std::vector<std::pair<std::size_t, std::size_t>> found;
    for (std::size_t i = 0; i < used_.size();) {
      if (used_[i]) {
        ++i;
        continue;
      }
      const std::size_t start = i;
      while (i < used_.size() && !used_[i]) ++i;
      found.emplace_back(start, i - start);
    }
    return found;
  }

 private:
  Bytes alignment_;
  std::vector<bool> used_;
};

void fuzz(const std::shared_ptr<Device>& device, unsigned seed, int steps) {
  constexpr Bytes kCapacity = 256_KiB;
  constexpr Bytes kAlignment = 256;
  constexpr std::size_t kStreams = 3;
  std::mt19937 random(seed);
  Budget budget("test", kCapacity);
  Arena arena(device, budget.reserve(kCapacity, "arena"), {.alignment = kAlignment});
  Model model(kCapacity, kAlignment);
  std::vector<std::shared_ptr<Stream>> streams;
  for (std::size_t i = 0; i < kStreams; ++i) {
    streams.push_back(device->make_stream({.name = fmt::format("s{}", i)}));
  }
  struct Held {
    Block block;
    std::size_t stream = 0;
    std::byte tag{};
  };
  std::vector<Held> held;
  std::atomic<int> wrong = 0;

  for (int step = 0; step < steps; ++step) {
    const bool allocate = held.empty() || random() % 100 < 55;
    if (allocate) {
      const Bytes bytes = random() % (random() % 4 == 0 ? kCapacity / 4 : 4_KiB);
      const std::size_t s = random() % kStreams;
      const std::optional<Bytes> expected = model.best_fit(bytes);
      std::optional<Block> block = arena.try_allocate(bytes, *streams[s]);
      ASSERT_EQ(block.has_value(), expected.has_value()) << "step " << step;
      if (block) {
        ASSERT_EQ(block->offset(), *expected) << "step " << step;
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(block->data()) % kAlignment, 0u);
        model.set(block->offset(), bytes, true);
        const auto tag = static_cast<std::byte>(step);
        streams[s]->fill_async(block->data(), tag, bytes);
        held.push_back({std::move(*block), s, tag});
        continue;
      }
    }
    if (held.empty()) continue;
    // Read it back on its own stream or on another one, then free it while that is still queued.
    const std::size_t victim = random() % held.size();
    Held out = std::move(held[victim]);
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
    Stream* reader = streams[out.stream].get();
    if (random() % 2 == 0) {
      const auto filled = device->make_event();
      reader->record(*filled);
      reader = streams[random() % kStreams].get();
      reader->wait(*filled);
      out.block.touch(*reader);
    }
    reader->enqueue("verify",
                    [data = out.block.data(), size = out.block.size(), tag = out.tag, &wrong] {
                      for (Bytes i = 0; i < size; ++i) wrong += data[i] != tag;
                    },
                    {Use::reads(out.block.data(), out.block.size())});
    model.set(out.block.offset(), out.block.size(), false);
    out.block.free();
    const ArenaStats stats = arena.stats();
    ASSERT_EQ(stats.free_ranges, model.runs().size()) << "step " << step;
  }
  held.clear();
  device->synchronize();
  EXPECT_EQ(wrong, 0);
  const ArenaStats stats = arena.stats();
  EXPECT_EQ(stats.free_ranges, 1u);
  EXPECT_EQ(stats.largest_free, kCapacity);
  EXPECT_EQ(stats.blocks, 0u);
}

TEST(ArenaFuzz, OnTheHost) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    auto checker = std::make_shared<OrderingChecker>();
    fuzz(host::make_device({.checker = checker}), seed, 600);
    checker->check();
  }
}

TEST(ArenaFuzz, OnTheEmulatedDevice) {
  for (unsigned seed = 100; seed < 106; ++seed) {
    auto checker = std::make_shared<OrderingChecker>();
    fuzz(emulated::make_device({.checker = checker}), seed, 400);
    checker->check();
  }
}

TEST(ArenaFuzz, OnTheEmulatedDeviceWithoutTheChecker) {
  for (unsigned seed = 200; seed < 204; ++seed) {
    fuzz(emulated::make_device({.checker = nullptr}), seed, 600);
  }
}

}  // namespace
}  // namespace pagoda::device

// SPDX-License-Identifier: Apache-2.0
// Communication is counted: with Ψ bytes of parameters on N ranks, a step moves 2Ψ·(N−1)/N to each
// rank in stages 0 to 2, and 3Ψ·(N−1)/N in stage 3, where pages are fetched once in forward and
// once in backward.
#include <mutex>

#include <gtest/gtest.h>

#include "pagoda/comm/group.h"
#include "pagoda/comm/thread_world.h"
#include "unit/engine/rehearsal.h"

namespace pagoda::engine {
namespace {

/// A world that keeps account of its groups.
class CountedWorld final : public comm::World {
 public:
  explicit CountedWorld(std::shared_ptr<comm::World> world) : world_(std::move(world)) {}

  int rank() const noexcept override { return world_->rank(); }
  int size() const noexcept override { return world_->size(); }
  std::unique_ptr<comm::Group> make_group(std::string name) override {
    auto group = world_->make_group(std::move(name));
    groups_.push_back(group.get());
    return group;
  }
  void put(std::string_view key, std::string_view value) override { world_->put(key, value); }
  std::optional<std::string> get(std::string_view key) override { return world_->get(key); }

  /// Bytes that have come to this rank. While the groups live.
  Bytes received() const {
    Bytes sum = 0;
    for (const comm::Group* group : groups_) sum += group->stats().total().received;
    return sum;
  }

 private:
  const std::shared_ptr<comm::World> world_;
  std::vector<const comm::Group*> groups_;
};

constexpr std::uint64_t kElements = 16 * 4096;
constexpr std::size_t kPages = 16;
constexpr Bytes kPageBytes = kElements * 2;
constexpr Bytes kAll = kPages * kPageBytes;

/// Bytes that came to each rank, without pages that were fetched ahead and evicted before their
/// use: how many these are depends on who gets to run when, and they are counted by themselves.
std::vector<double> received(const Rehearsal& r) {
  Worlds worlds;
  std::vector<std::shared_ptr<CountedWorld>> counted;
  for (auto& world : comm::make_thread_worlds(r.ranks)) {
    counted.push_back(std::make_shared<CountedWorld>(world));
    worlds.push_back(counted.back());
  }
  const double page = static_cast<double>(kPageBytes) * (r.ranks - 1) / r.ranks;
  std::vector<double> out(worlds.size());
  rehearse(r, worlds, [&](int rank, Runtime& runtime) {
    const auto wasted = static_cast<double>(runtime.stats().pager.wasted_prefetches);
    out[static_cast<std::size_t>(rank)] =
        static_cast<double>(counted[static_cast<std::size_t>(rank)]->received()) - wasted * page;
  });
  return out;
}

/// Bytes that come to each rank in a step: the difference between a longer and a shorter run.
std::vector<double> per_step(Rehearsal r) {
  constexpr int kMore = 3;
  r.steps = 2;
  const std::vector<double> before = received(r);
  r.steps += kMore;
  const std::vector<double> after = received(r);
  std::vector<double> out;
  for (std::size_t i = 0; i < before.size(); ++i) {
    out.push_back((after[i] - before[i]) / kMore);
  }
  return out;
}

Rehearsal wide(int ranks, unsigned zero) {
  Rehearsal r;
  r.ranks = ranks;
  r.config.device = "cpu";
  r.config.zero = zero;
  r.config.prefetch = false;
  r.config.parameters = r.config.gradients = r.config.optimizer_state = Placement::Host;
  r.config.gradient_staging = 2 * kPageBytes;
  r.config.device_budget = 2 * kPageBytes + 3 * kPageBytes;  // three pages at a time
  r.config.update_chunk = 1_MiB;
  r.config.bucket = 4_MiB;
  r.pages = std::vector<std::uint64_t>(kPages, kElements);
  r.optimizer = Sgd{.lr = 0.1};
  return r;
}

/// Messages have flags, requests and acknowledgements beside their bytes: so much for a page, a
/// peer and a time that the page moves.
double envelopes(int ranks, int moves) {
  return 1024.0 * kPages * (ranks - 1) * moves;
}

TEST(Volume, IsTwiceTheParametersInStages0To2) {
  for (const unsigned zero : {0U, 1U, 2U}) {
    for (const int ranks : {2, 4}) {
      const double share = static_cast<double>(kAll) * (ranks - 1) / ranks;
      for (const double bytes : per_step(wide(ranks, zero))) {
        EXPECT_GE(bytes, 2 * share) << "zero " << zero << ", ranks " << ranks;
        EXPECT_LE(bytes, 2 * share + envelopes(ranks, 2)) << "zero " << zero << ", ranks " << ranks;
      }
    }
  }
}

TEST(Volume, IsThreeTimesTheParametersInStage3) {
  for (const bool prefetch : {false, true}) {
    for (const int ranks : {2, 4}) {
      Rehearsal r = wide(ranks, 3);
      r.config.prefetch = prefetch;
      const double share = static_cast<double>(kAll) * (ranks - 1) / ranks;
      // The last pages of a forward are still there when backward begins; and a run may end with
      // pages that were fetched ahead for nothing.
      const double kept = (prefetch ? 6.0 : 3.0) * kPageBytes * (ranks - 1) / ranks;
      for (const double bytes : per_step(r)) {
        // With foresight more pages may stay, as the times have it; never fewer than without.
        const double least = prefetch ? 2 * share - kept : 3 * share - kept;
        EXPECT_GE(bytes, least) << "prefetch " << prefetch << ", ranks " << ranks;
        EXPECT_LE(bytes, 3 * share + envelopes(ranks, 3) + (prefetch ? kept : 0))
            << "prefetch " << prefetch << ", ranks " << ranks;
      }
    }
  }
}

TEST(Volume, IsLessWherePagesStay) {
  Rehearsal r = wide(2, 3);
  r.config.device_budget = 2 * kPageBytes + 2 * kAll;
  const double share = static_cast<double>(kAll) / 2;
  for (const double bytes : per_step(r)) {
    EXPECT_GE(bytes, 2 * share);
    EXPECT_LE(bytes, 2 * share + envelopes(2, 2));
  }
}

/// More micro-batches fetch and reduce again; the update is one.
TEST(Volume, GrowsWithMicroBatchesByFetchesAndReductionsOnly) {
  Rehearsal r = wide(2, 2);
  r.micro_batches = 3;
  const double share = static_cast<double>(kAll) / 2;
  for (const double bytes : per_step(r)) {
    EXPECT_GE(bytes, 4 * share);
    EXPECT_LE(bytes, 4 * share + envelopes(2, 4));
  }
}

}  // namespace
}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
// Pages that are frozen at attach() train from the step after they are thawed: with the bits of the
// kernels, whatever the stage; and what cannot be is refused on all ranks alike.
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/engine/runtime.h"
#include "unit/engine/rehearsal.h"
#include "unit/io/scratch_directory.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::engine {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Thaw : public testing::TestWithParam<std::tuple<int, unsigned>> {
 protected:
  Thaw() {
    r.config = tiny();
    std::tie(r.ranks, r.config.zero) = GetParam();
    r.steps = 5;
    r.frozen = {3, 1, 4};
    // One page from the start, one in the middle of a step's micro-batches, one after them.
    r.thawed = [this](int /*rank*/, int step, int micro, std::size_t page) {
      if (page == 3) return true;
      if (page == 1) return step > 1 || (step == 1 && micro + 1 >= r.micro_batches);
      return step > 2 || (step == 2 && micro == r.micro_batches);
    };
  }

  /// Bytes of gradients and states of each rank at the end, and what it used of the host's at most.
  struct Held {
    Bytes states = 0;
    Bytes used = 0;
  };
  std::vector<Held> held() {
    std::vector<Held> out(static_cast<std::size_t>(r.ranks));
    rehearse(r, comm::make_thread_worlds(r.ranks), [&](int rank, Runtime& runtime) {
      const Stats stats = runtime.stats();
      out[static_cast<std::size_t>(rank)] = {
          stats.held(pager::Tier::Host, pager::tag::kGradients) +
              stats.held(pager::Tier::Host, pager::tag::kOptimizer),
          runtime.tiers().budget(pager::Tier::Host).used()};
    });
    return out;
  }

  Rehearsal r;
};

TEST_P(Thaw, EveryTouchSeesTheBytesOfTheKernels) {
  for (const int micro_batches : {1, 3}) {
    r.micro_batches = micro_batches;
    EXPECT_NO_THROW(rehearse(r)) << micro_batches;
  }
}

TEST_P(Thaw, SoWithANormPagesLeftOutAndStochasticRounding) {
  r.config.clip = 0.5;
  r.config.gradient_dtype = GradientType::Fp32;
  r.config.moments = MomentType::Bf16;
  r.config.master = Master::Split;
  r.micro_batches = 2;
  r.all_contribute = false;
  r.writes = true;
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(Thaw, SoWhereUpdatesBeginBeforeTheNormIsKnown) {
  r.config.clip = 0.5;
  r.config.clip_ahead = true;
  r.config.prefetch = false;
  r.steps = 8;
  r.gradient_sizes = {1e-3F, 1e-3F, 1e-3F, 1e-3F, 1e-3F, 1, 1e-3F, 1};
  std::uint64_t early = 0;
  std::uint64_t undone = 0;
  EXPECT_NO_THROW(rehearse(r, comm::make_thread_worlds(r.ranks), [&](int rank, Runtime& runtime) {
    if (rank != 0) return;
    early = runtime.stats().updates.early;
    undone = runtime.stats().updates.rolled_back;
  }));
  EXPECT_GT(undone, r.pages.size() - 1);  // what was thawed, too
  EXPECT_GT(early, undone);
}

TEST_P(Thaw, SoOnAnAsynchronousDeviceWithStatesOnDisk) {
  const io::ScratchDirectory directory;
  r.config.device = "emulated";
  r.config.check_order = true;
  r.config.parameters = r.config.gradients = r.config.optimizer_state = Placement::Nvme;
  r.config.nvme = {directory.path().string()};
  r.config.nvme_budget = 16_MiB;
  r.micro_batches = 2;
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(Thaw, SoWithStatesOnTheDevice) {
  r.config.gradients = r.config.optimizer_state = Placement::Device;
  r.config.device_budget = 80_KiB + 760_KiB;  // where pages must make room, and leave crumbs
  EXPECT_NO_THROW(rehearse(r));
}

TEST_P(Thaw, UpdatesBeginEarlyFromTheSecondStepOn) {
  r.config.prefetch = false;  // a page that is just being fetched waits for step()
  std::vector<std::uint64_t> early(static_cast<std::size_t>(r.ranks));
  rehearse(r, comm::make_thread_worlds(r.ranks), [&](int rank, Runtime& runtime) {
    early[static_cast<std::size_t>(rank)] = runtime.stats().updates.early;
  });
  // Three pages train from the first step on and page 3, too; page 1 has its first gradient in the
  // second, page 4 in the fourth.
  const std::uint64_t steps = 4 * 4 + 3 + 1;
  EXPECT_THAT(early, testing::Each(steps));
}

TEST_P(Thaw, TakesNoMemoryBefore) {
  const std::vector<Held> all = held();
  r.thawed = [](int, int, int, std::size_t) { return false; };
  const std::vector<Held> none = held();
  r.frozen = {};
  const std::vector<Held> from_the_start = held();
  Bytes states = 0;  // of the three pages, all of which one rank or another has
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].states, from_the_start[i].states);
    states += all[i].states - none[i].states;
  }
  EXPECT_GE(states, (5000 + 20000 + 4096) * (2 + 4 + 4 + 4));
}

TEST_P(Thaw, OnSomeRanksOnlyIsRefusedOnAllAndLeavesNoTrace) {
  if (r.ranks == 1) return;
  const auto differ = [this](int rank, int step, std::size_t page) {
    return rank == r.ranks - 1 && step == 2 && page == 1;
  };
  for (const bool with_gradient : {true, false}) {
    r.thawed = [this, differ, with_gradient](int rank, int step, int micro, std::size_t page) {
      return page == 3 || (differ(rank, step, page) && (with_gradient || micro == r.micro_batches));
    };
    r.refused = [](int step) { return step == 2; };
    // What all ranks had thawed before goes on in that step.
    r.frozen = {1};
    const std::vector<Held> after = held();
    r.refused = {};
    r.thawed = [](int, int, int, std::size_t) { return false; };
    const std::vector<Held> never = held();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i].states, never[i].states);
  }
}

TEST_P(Thaw, WithoutRoomIsRefusedOnAllRanksAndTriedAgain) {
  r.frozen = {1};
  const auto from = [](int step) {
    return
        [step](int /*rank*/, int now, int /*micro*/, std::size_t /*page*/) { return now >= step; };
  };
  r.thawed = from(100);
  const std::vector<Held> never = held();
  r.thawed = from(2);
  r.refused = [](int step) { return step >= 2; };
  r.configure = [&](int rank, Config& config) {
    // A gradient may wait on the host for its turn, and one more, where there are several ranks.
    const Bytes in_wait = r.ranks == 1 ? 0 : 2 * 2 * r.pages[3];
    if (rank == 0) config.host_budget = never[0].used + in_wait + 8_KiB;
  };
  const std::vector<Held> refused = held();
  for (std::size_t i = 0; i < refused.size(); ++i) EXPECT_EQ(refused[i].states, never[i].states);
}

INSTANTIATE_TEST_SUITE_P(, Thaw,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(0U, 1U, 3U)),
                         kRanksAndStage);

/// One rank with two pages of ones, the first of which is frozen.
class TwoPages {
 public:
  explicit TwoPages(const std::shared_ptr<comm::World>& world, bool frozen = true)
      : values_(5000, 1.0F), runtime_(config(), world) {
    std::vector<TrainedSpec> specs;
    for (std::uint32_t p = 0; p < 2; ++p) {
      pages_.push_back(&runtime_.pager().adopt(fmt::format("page {}", p), values_.size(),
                                               sizeof(float), pager::Placement::Host, bytes(),
                                               device::Direction::HostToHost));
      specs.push_back(
          {pages_.back(), kernels::Dtype::F32, {{{0, values_.size()}, 0, 0}}, {{p, 0}}});
    }
    std::vector<FrozenSpec> first;
    if (frozen) first.push_back({0, 0, "page 0", {}});
    runtime_.attach(pages_, std::move(specs), {Sgd{.lr = 1}}, first);
  }

  Runtime& runtime() { return runtime_; }
  void set_thawed(bool thawed) {
    FrozenSet now;
    if (thawed) now.insert(0);
    runtime_.set_thawed(now);
  }
  /// A pass in which both pages have gradients of ones, as far as they are thawed.
  void backward(bool thawed) {
    set_thawed(thawed);
    runtime_.begin_backward(true);
    for (std::size_t p = thawed ? 0 : 1; p < 2; ++p) {
      Contribution contribution;
      contribution.page = runtime_.trained(*pages_[p]);
      contribution.present = {true};
      contribution.data = bytes();
      runtime_.contribute(std::move(contribution));
    }
    runtime_.end_backward();
  }
  void step() {
    runtime_.step([](pager::Page&) {});
  }
  /// Every element of a page, if all are alike.
  float value(std::size_t p) {
    pager::PlainBinding place;
    runtime_.pager().set_binding(*pages_[p], &place);
    const pager::Access access{pages_[p], false};
    const pager::Pin pin = runtime_.pager().touch({&access, 1}, 1, nullptr);
    const std::span all(reinterpret_cast<const float*>(place.data()), values_.size());
    const float first = all.front();
    EXPECT_THAT(all, testing::Each(first));
    runtime_.pager().set_binding(*pages_[p], nullptr);
    return first;
  }

 private:
  static Config config() {
    Config config = tiny();
    config.reduction = Reduction::Sum;
    config.timeout = 10;
    return config;
  }
  const std::byte* bytes() const { return reinterpret_cast<const std::byte*>(values_.data()); }

  std::vector<float> values_;
  std::vector<pager::Page*> pages_;
  Runtime runtime_;
};

/// Runs each rank on a thread of its own; what each returns.
std::vector<std::string> on_ranks(
    int ranks, const std::function<std::string(const std::shared_ptr<comm::World>&)>& rank) {
  const auto worlds = comm::make_thread_worlds(ranks);
  std::vector<std::string> out(worlds.size());
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    threads.emplace_back([&, i] { out[i] = rank(worlds[i]); });
  }
  threads.clear();
  return out;
}

/// What ranks are told of which some thaw the first page.
std::vector<std::string> said(int ranks, const std::set<int>& thawing) {
  return on_ranks(ranks, [&](const auto& world) {
    TwoPages pages(world);
    pages.set_thawed(thawing.contains(world->rank()));
    std::string out;
    try {
      pages.step();
    } catch (const ThawRefused& refused) {
      out = refused.message();
    }
    pages.runtime().check();
    pages.set_thawed(false);
    pages.step();
    pages.runtime().finish();
    return out;
  });
}

TEST(ThawMessages, NameTheParameterAndTheRanks) {
  EXPECT_THAT(said(4, {1}),
              testing::Each(AllOf(HasSubstr("'page 0' on rank 1, not on ranks 0, 2, 3"),
                                  HasSubstr("requires_grad_()"))));
  EXPECT_THAT(said(2, {0, 1}), testing::Each(""));
  EXPECT_THAT(said(2, {}), testing::Each(""));
}

TEST(ThawMessages, NameWhatIsFrozenOnSomeRanksOnlyAtAttach) {
  EXPECT_THAT(on_ranks(2,
                       [](const auto& world) -> std::string {
                         try {
                           const TwoPages pages(world, world->rank() == 0);
                         } catch (const std::exception& error) {
                           return error.what();
                         }
                         return "";
                       }),
              testing::Each(HasSubstr("trained in group 0 once it is thawed) on rank 0")));
}

TEST(ThawJoin, ARankWithoutDataGoesAlongWithWhatTheOthersThaw) {
  EXPECT_THAT(on_ranks(3,
                       [](const auto& world) {
                         TwoPages pages(world);
                         pages.backward(false);
                         pages.step();
                         if (world->rank() != 0) {
                           pages.backward(true);
                           pages.step();
                         }
                         pages.runtime().join([](pager::Page&) {});
                         pages.runtime().finish();
                         return fmt::format("{} {}", pages.value(0), pages.value(1));
                       }),
              testing::Each("-1 -4"));  // 1 - 2, and 1 - 3 - 2
}

}  // namespace
}  // namespace pagoda::engine

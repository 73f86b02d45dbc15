// SPDX-License-Identifier: Apache-2.0
// Updates that begin before the norm is known: as if they had waited for it, whatever it turns out
// to be.
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/engine/runtime.h"
#include "unit/engine/rehearsal.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

constexpr float kClipped = 1;
constexpr float kNot = 1e-3F;

class ClipAhead : public testing::TestWithParam<std::tuple<int, unsigned>> {
 protected:
  ClipAhead() {
    r.config = tiny();
    r.config.clip = 0.5;
    r.config.clip_ahead = true;
    r.config.prefetch = false;  // a page that is just being fetched waits for step()
    std::tie(r.ranks, r.config.zero) = GetParam();
    r.gradient_sizes = {kNot, kNot, kClipped, kNot, kNot, kClipped, kClipped};
    r.steps = static_cast<int>(r.gradient_sizes.size());
  }

  struct Counts {
    std::uint64_t early = 0;
    std::uint64_t rolled_back = 0;
    friend bool operator==(const Counts&, const Counts&) = default;
  };

  /// Trains, with every byte compared, and says what each rank's updates did.
  std::vector<Counts> train() {
    std::vector<Counts> out(static_cast<std::size_t>(r.ranks));
    rehearse(r, comm::make_thread_worlds(r.ranks), [&](int rank, Runtime& runtime) {
      const Stats stats = runtime.stats();
      out[static_cast<std::size_t>(rank)] = {stats.updates.early, stats.updates.rolled_back};
      if (rank == 0) host_peak_ = runtime.tiers().budget(pager::Tier::Host).peak();
      if (rank == std::min(1, r.ranks - 1)) {
        undo_ = stats.held(pager::Tier::Host, pager::tag::kEarly);
      }
    });
    return out;
  }
  std::vector<Counts> on_each_rank(Counts counts) const {
    return std::vector<Counts>(static_cast<std::size_t>(r.ranks), counts);
  }

  Rehearsal r;
  Bytes host_peak_ = 0;  // of rank 0, when it last trained
  Bytes undo_ = 0;       // what rank 1, or the only one, had to undo updates with
};

// The first step begins nothing early; the third and the sixth come after one that did not clip,
// and do; after them none is trusted.
TEST_P(ClipAhead, BeginsAfterAStepThatDidNotClipAndUndoesWhatDoes) {
  const std::uint64_t pages = r.pages.size();
  EXPECT_EQ(train(), on_each_rank({4 * pages, 2 * pages}));
  r.config.early_updates = false;
  EXPECT_EQ(train(), on_each_rank({0, 0}));
  r.config.early_updates = true;
  r.config.clip_ahead = false;
  EXPECT_EQ(train(), on_each_rank({0, 0}));
}

TEST_P(ClipAhead, GivesTheSameBitsWithEveryStateThereIs) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "minutes under this sanitizer, and no thread that the other tests do not have";
#endif
  const std::uint64_t pages = r.pages.size();
  const std::vector<Optimizer> others = {Adam{.weight_decay = 0.1}, Sgd{.lr = 0.1, .momentum = 0.9},
                                         Sgd{.lr = 0.1}, Lion{}, Sgd{.lr = 0.1}};
  std::size_t next = 0;
  for (const kernels::Dtype dtype :
       {kernels::Dtype::BF16, kernels::Dtype::F16, kernels::Dtype::F32}) {
    for (const auto master : {Master::Whole, Master::Split}) {
      for (const auto moments : {MomentType::Fp32, MomentType::Bf16}) {
        for (const Optimizer& optimizer : {Optimizer(AdamW{}), others[next++ % others.size()]}) {
          r.dtype = dtype;
          if (dtype == kernels::Dtype::F32) r.config.device_budget = 240_KiB;
          r.config.master = master;
          r.config.moments = moments;
          r.optimizer = optimizer;
          EXPECT_EQ(train(), on_each_rank({4 * pages, 2 * pages}))
              << kernels::dtype_name(dtype) << ' ' << optim::name(optimizer);
        }
      }
    }
  }
}

TEST_P(ClipAhead, SoWithWritesLookupsThreadsAndSeveralMicroBatches) {
  r.config.master = Master::Split;
  r.config.lookup_in_place = 1;
  r.touching_threads = 2;
  r.micro_batches = 2;
  r.writes = true;
  r.looks_up = true;
  for (const bool prefetch : {false, true}) {
    r.config.prefetch = prefetch;
    for (const bool all : {true, false}) {
      r.all_contribute = all;
      for (const Counts& counts : train()) EXPECT_GT(counts.rolled_back, 0U);
    }
  }
}

TEST_P(ClipAhead, SoOnAnAsynchronousDevice) {
  r.config.device = "emulated";
  r.config.check_order = true;
  r.config.prefetch = true;
  for (const auto master : {Master::Whole, Master::Split}) {
    r.config.master = master;
    for (const Counts& counts : train()) EXPECT_GT(counts.rolled_back, 0U);
  }
}

TEST_P(ClipAhead, SoWithPagesThatNeverLeaveTheDevice) {
  r.config.device_budget = 1_MiB;
  r.config.parameters = Placement::Auto;
  r.dtype = kernels::Dtype::F32;
  for (const Counts& counts : train()) EXPECT_GT(counts.rolled_back, 0U);
}

TEST_P(ClipAhead, SoWithNormsThatAreNone) {
  r.gradient_sizes = {kNot, kNot, std::numeric_limits<float>::infinity()};
  r.steps = 3;
  const std::uint64_t pages = r.pages.size();
  EXPECT_EQ(train(), on_each_rank({2 * pages, 0}));
}

TEST_P(ClipAhead, RanksUndoAsMuchAsTheOneThatHasRoomForLeast) {
  const Counts all = train()[0];
  const Bytes host = host_peak_;
  const Bytes undo = undo_;
  r.configure = [&](int rank, Config& config) {
    if (rank == 0) config.host_budget = host - undo / 2;
  };
  const std::vector<Counts> counts = train();
  EXPECT_EQ(counts, on_each_rank(counts[0]));
  EXPECT_GT(counts[0].rolled_back, 0U);
  EXPECT_LT(counts[0].rolled_back, all.rolled_back);
  EXPECT_GT(undo_, 0U);
  EXPECT_LT(undo_, undo);  // nobody keeps what another does not
}

TEST_P(ClipAhead, LeavesToTheStepWhatCannotBeUndone) {
  const io::ScratchDirectory directory;
  r.config.optimizer_state = Placement::Nvme;
  r.config.nvme = {directory.path().string()};
  r.config.nvme_budget = 16_MiB;
  EXPECT_EQ(train(), on_each_rank({0, 0}));
}

INSTANTIATE_TEST_SUITE_P(, ClipAhead,
                         testing::Values(std::tuple(1, 3U), std::tuple(2, 0U), std::tuple(2, 2U),
                                         std::tuple(3, 1U), std::tuple(3, 3U)),
                         kRanksAndStage);

}  // namespace
}  // namespace pagoda::engine

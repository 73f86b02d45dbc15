// SPDX-License-Identifier: Apache-2.0
// A pointer to a page that has one copy only, taken while an early update of it runs.
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/solo_world.h"
#include "pagoda/io/fault/fault_plan.h"
#include "pagoda/pager/pending_updates.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

using pager::Page;
using pager::Range;

/// A rank's updater as its pager sees it, with an update that begins while a hold is being taken:
/// after the first look for one, and before the hold counts.
class BeginsDuringHold final : public pager::PendingUpdates {
 public:
  /// `begin` starts the update, `let_go` lets it end: when the pager looks again, if it does.
  BeginsDuringHold(Runtime& runtime, std::function<void()> begin, std::function<void()> let_go)
      : pager_(runtime.pager()),
        updates_(runtime.updater()),
        begin_(std::move(begin)),
        let_go_(std::move(let_go)) {
    pager_.set_pending_updates(this);
  }
  BeginsDuringHold(const BeginsDuringHold&) = delete;
  BeginsDuringHold& operator=(const BeginsDuringHold&) = delete;
  ~BeginsDuringHold() override { pager_.set_pending_updates(&updates_); }

  void about_to_hold(Page& page) override {
    const bool held = pager_.look(page).holds > 0;
    if (held) let_go_();
    updates_.about_to_hold(page);
    if (!held) begin_();
  }
  void wait_for_update(Page& page) override { updates_.wait_for_update(page); }
  const std::byte* wait_for_rows(Page& page, std::span<const Range> rows) override {
    return updates_.wait_for_rows(page, rows);
  }
  void about_to_write(Page& page) override { updates_.about_to_write(page); }
  Range kept(const Page& page, Range shard) override { return updates_.kept(page, shard); }
  void overwritten(Page& page, std::uint64_t begin, std::uint64_t count, const std::byte* before,
                   const std::byte* after) override {
    updates_.overwritten(page, begin, count, before, after);
  }

 private:
  pager::Pager& pager_;
  optim::Updater& updates_;
  const std::function<void()> begin_;
  const std::function<void()> let_go_;
};

/// One page on the device for good, with its optimizer state on disk: an update of it reads the
/// state first, and the parameter, where it lies, when it has that.
SmallRank::Options one_fixed_page(const io::ScratchDirectory& directory) {
  SmallRank::Options out;
  out.config = tiny();
  out.config.parameters = Placement::Device;
  out.config.optimizer_state = Placement::Nvme;
  out.config.nvme = {directory.path().string()};
  out.config.nvme_budget = 1_MiB;
  out.config.faults = std::make_shared<io::FaultPlan>();
  out.optimizer = AdamW{.lr = 0.1};
  out.pages = {1000};
  return out;
}

TEST(EarlyHold, IsTakenWhenTheUpdateHasReadThePage) {
  const io::ScratchDirectory directory;
  const SmallRank::Options options = one_fixed_page(directory);
  io::FaultPlan& faults = *options.config.faults;
  // The first step begins nothing early.
  const auto first_step = [](SmallRank& rank) {
    rank.attach();
    rank.backward(0);
    rank.step();
    rank.runtime().finish();
  };
  SmallRank undisturbed(options, comm::make_solo_world());
  first_step(undisturbed);
  undisturbed.backward(1);
  undisturbed.step();

  std::latch gate(1);
  SmallRank rank(options, comm::make_solo_world());
  first_step(rank);
  pager::Pager& pager = rank.runtime().pager();
  ASSERT_TRUE(pager.look(rank.page(0)).fixed);
  faults.add({.fault = {.kind = io::FaultKind::Delay, .gate = &gate}, .op = io::Op::Read});
  const auto let_go = [&] {
    if (!gate.try_wait()) gate.count_down();
  };
  {
    const BeginsDuringHold updates(
        rank.runtime(),
        [&] {
          rank.backward(1);
          while (faults.injected(io::FaultKind::Delay) == 0) std::this_thread::yield();
        },
        let_go);
    const pager::Hold hold = pager.hold(rank.page(0), nullptr, false, pager::RawWrites::Refuse);
    std::memset(rank.data(0), 0x40, sizeof(float));  // refused, and undone with the hold
    let_go();
    rank.runtime().updater().wait_for_all();
  }
  EXPECT_THROW(rank.runtime().check_raw_writes(), UserError);
  rank.step();
  EXPECT_EQ(rank.values(), undisturbed.values());
  EXPECT_EQ(rank.runtime().stats().updates.early, 1U);
}

}  // namespace
}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
// Ranks that do not do the same: both sides are named, on all ranks, and nobody waits for ever. A
// hang is CTest's time-out.
#include <chrono>
#include <map>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/comm/comm_error.h"
#include "pagoda/comm/thread_world.h"
#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"

namespace pagoda::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Bits = SmallRank::Bits;

SmallRank::Options plain(unsigned zero = 3) {
  SmallRank::Options out;
  out.config = tiny();
  out.config.zero = zero;
  out.config.heartbeat = 0.05;
  return out;
}

struct Act {
  std::string name;  // as messages have it, after one step
  std::function<void(SmallRank&)> act;
};

std::vector<Act> acts() {
  return {{"in step() 2", [](SmallRank& rank) { rank.step(); }},
          {"in zero_grad() after step() 1", [](SmallRank& rank) { rank.runtime().zero_grad(); }},
          {"in grad_norm() after step() 1", [](SmallRank& rank) { rank.runtime().grad_norm(); }},
          {"in grad('page 0') after step() 1",
           [](SmallRank& rank) {
             std::vector<float> to(rank.page(0).elements);
             rank.runtime().read_gradient(rank.page(0), to);
           }},
          {"in grad('page 1') after step() 1",
           [](SmallRank& rank) {
             std::vector<float> to(rank.page(1).elements);
             rank.runtime().read_gradient(rank.page(1), to);
           }},
          {"in barrier() after step() 1", [](SmallRank& rank) { rank.runtime().barrier(); }},
          {"in save_pretrained() after step() 1",
           [](SmallRank& rank) {
             rank.runtime().begin_call("save_pretrained");
             rank.runtime().end_call("");
           }},
          {"in release() after step() 1", [](SmallRank& rank) { rank.release(); }},
          {"in close() after step() 1", [](SmallRank&) {}}};
}

class DivergedRanks : public testing::TestWithParam<unsigned> {};

TEST_P(DivergedRanks, AreNamedWithTheirCallsOnEveryRank) {
  const log::Capture quiet([](auto, const auto&) {});
  const std::vector<Act> all = acts();
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      SCOPED_TRACE(all[a].name + " / " + all[b].name);
      for (const bool batch : {false, true}) {
        const auto ended = run_ranks(3, [&](auto world) {
          SmallRank::Options mine = plain(GetParam());
          mine.config.early_updates = false;  // or zero_grad() is an error of its own
          SmallRank rank(mine, world);
          rank.attach();
          rank.backward(0);
          rank.step();
          const bool first = world->rank() == 1;
          if (batch && first) rank.backward(1);
          (first ? all[a] : all[b]).act(rank);
          EXPECT_EQ(all[b].name, "in close() after step() 1") << "nobody was told";
        });
        for (int r = 0; r < 3; ++r) {
          if (r != 1 && all[b].name.starts_with("in close")) {
            EXPECT_THAT(ended[static_cast<std::size_t>(r)], IsEmpty());  // it had no more to do
            continue;
          }
          EXPECT_THAT(ended[static_cast<std::size_t>(r)],
                      AllOf(HasSubstr("rank 1 "), HasSubstr(all[a].name), HasSubstr("0, 2"),
                            HasSubstr(all[b].name)))
              << "rank " << r;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, DivergedRanks, testing::Values(1U, 3U),
                         testing::PrintToStringParamName());

TEST(Divergence, OfSettingsNamesTheSettingAndBothValuesAndTheEnginesLive) {
  const std::map<std::string, std::function<void(SmallRank::Options&)>> differences = {
      {"clip: it is 0 on rank 0 and 1 on rank 1", [](auto& options) { options.config.clip = 1; }},
      {"zero: it is 3 on rank 0 and 2 on rank 1", [](auto& options) { options.config.zero = 2; }},
      {"the optimizer of group 0: it is sgd(lr=0.5, momentum=0, dampening=0, nesterov=0, "
       "weight_decay=0) on rank 0 and adamw(",
       [](auto& options) { options.optimizer = AdamW{}; }},
      {"the number of parameters: it is 4 on rank 0 and 5 on rank 1",
       [](auto& options) { options.pages.push_back(3); }},
      {"parameter 1: it is 'page 1' (5000 elements of 4 bytes, trained in group 0) on rank 0 and "
       "'page 1' (5001 elements",
       [](auto& options) { options.pages[1] = 5001; }},
      {"parameter 1: it is 'page 1' (5000 elements of 4 bytes, trained in group 0) on rank 0 and "
       "'page 1' (5000 elements of 4 bytes, not trained) on rank 1",
       [](auto& options) { options.frozen = {1}; }},
      {"bucket: it is 24 KiB on rank 0 and 32 KiB on rank 1",
       [](auto& options) { options.config.bucket = 32_KiB; }}};
  for (const auto& [text, difference] : differences) {
    const auto ended = run_ranks(2, [&, &text = text, &difference = difference](auto world) {
      SmallRank::Options mine = plain();
      if (world->rank() == 1) difference(mine);
      SmallRank rank(mine, world);
      EXPECT_THAT(thrown_by([&] { rank.attach(); }), HasSubstr("the ranks differ in " + text));
      EXPECT_FALSE(rank.runtime().failed());
      rank.runtime().barrier();
    });
    EXPECT_THAT(ended, Each(IsEmpty())) << text;
  }
}

TEST(Divergence, OfTimeoutsIsAnErrorOfTheEngine) {
  const log::Capture quiet([](auto, const auto&) {});
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank::Options mine = plain();
    mine.config.timeout = world->rank() == 1 ? 30 : 20;
    mine.config.heartbeat = Config::kLeastBeat;  // its thread looks at the engine while that goes
    const SmallRank rank(mine, world);
  });
  EXPECT_THAT(ended,
              Each(HasSubstr("the ranks differ in timeout: it is 20 on rank 0 and 30 on rank 1")));
}

TEST(Divergence, OfLongNamesIsOne) {
  const log::Capture quiet([](auto, const auto&) {});
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank rank(plain(), world);
    rank.attach();
    std::string name;  // in which every place is inside of a character, or at its end
    for (int i = 0; i < 100; ++i) name += "é";
    rank.runtime().pager().rename(rank.page(1), name + " 1");
    rank.runtime().pager().rename(rank.page(2), name + " 2");
    const std::size_t page = world->rank() == 0 ? 1 : 2;
    std::vector<float> to(rank.page(page).elements);
    rank.runtime().read_gradient(rank.page(page), to);
  });
  EXPECT_THAT(ended, Each(AllOf(HasSubstr("é…é"), HasSubstr("é 1')"), HasSubstr("é 2')"))));
}

TEST(RefusedCall, OfOneRankIsNoneOfAny) {
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank rank(plain(), world);
    rank.attach();
    for (int step = 0; step < 2; ++step) {
      rank.backward(step);
      rank.step();
    }
    const std::string who = world->rank() == 0 ? "" : "rank 0: ";
    rank.backward(2, world->rank() == 0);
    EXPECT_THAT(thrown_by([&] { rank.runtime().zero_grad(); }),
                testing::StartsWith(who + "zero_grad() came between the last backward()"));
    EXPECT_THAT(thrown_by([&] { rank.runtime().grad_norm(); }),
                testing::StartsWith(who + "grad_norm() was called between the last backward()"));
    rank.step();
    if (world->rank() == 2) {  // a rank that has joined is not disturbed
      rank.join();
    } else {
      rank.backward(3, world->rank() == 0);
      EXPECT_THAT(thrown_by([&] { rank.runtime().zero_grad(); }), HasSubstr("zero_grad() came"));
      rank.step();
      rank.join();
    }
    rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

TEST(Divergence, OfClippingAfterAttachFailedCanBeMended) {
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank rank(plain(), world);
    if (world->rank() == 0) rank.runtime().set_clip(0.5);
    EXPECT_THAT(thrown_by([&] { rank.attach(); }), HasSubstr("clip"));
    if (world->rank() == 1) rank.runtime().set_clip(0.5);
    rank.attach();
    rank.backward(0);
    rank.step();
    rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

TEST(Divergence, OfLearningRatesIsAnErrorOfTheStep) {
  const log::Capture quiet([](auto, const auto&) {});
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank rank(plain(), world);
    rank.attach();
    for (int step = 0; step < 4; ++step) {
      if (step == 3 && world->rank() == 2) rank.runtime().set_learning_rate(0, 0.25);
      rank.backward(step);
      rank.step();
      EXPECT_LT(step, 3);
    }
  });
  EXPECT_THAT(ended, Each(AllOf(HasSubstr("the optimizer of group 0: it is sgd(lr=0.5"),
                                HasSubstr("on rank 0 and sgd(lr=0.25"), HasSubstr("on rank 2"))));
}

TEST(Divergence, OfPageNumbersIsNone) {
  std::vector<std::vector<Bits>> seen(3);
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank::Options mine = plain();
    mine.strays = world->rank() == 1;
    SmallRank rank(mine, world);
    rank.attach();
    for (int step = 0; step < 3; ++step) {
      rank.backward(step);
      rank.step();
      (void)rank.values();
    }
    seen[static_cast<std::size_t>(world->rank())] = rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[0], seen[2]);
}

TEST(Divergence, OfBudgetsIsAnErrorOnAllRanksAndTheEnginesLive) {
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine = plain();
    mine.optimizer = AdamW{};
    mine.pages = {300, 15000, 15000, 15000};
    mine.config.host_budget = world->rank() == 1 ? 350_KiB : 4_MiB;
    SmallRank rank(mine, world);
    const std::vector<Bits> before = rank.values();
    EXPECT_THAT(
        thrown_by([&] { rank.attach(); }),
        AllOf(HasSubstr("do not fit"), HasSubstr(world->rank() == 0 ? "rank 1: " : "host_budget")));
    EXPECT_EQ(rank.values(), before);
    rank.runtime().barrier();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

class LateFailure : public testing::TestWithParam<unsigned> {};

TEST_P(LateFailure, OfAttachOnOneRankLeavesNoModelOnAny) {
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank rank(plain(GetParam()), world);
    EXPECT_THAT(thrown_by([&] {
                  rank.attach([&] {
                    if (world->rank() == 1) throw std::bad_alloc();
                  });
                }),
                HasSubstr(world->rank() == 1 ? "" : "rank 1: "));
    EXPECT_EQ(rank.values(), rank.initial());
    EXPECT_EQ(rank.runtime().trained(rank.page(0)), nullptr);
    rank.attach();
    rank.backward(0);
    rank.step();
    rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

INSTANTIATE_TEST_SUITE_P(Zero, LateFailure, testing::Range(0U, 4U),
                         testing::PrintToStringParamName());

TEST(Divergence, OfASharedCallIsAnErrorOnAllRanksAndTheEnginesLive) {
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank rank(plain(), world);
    rank.attach();
    rank.runtime().begin_call("save_pretrained");
    EXPECT_THAT(
        thrown_by([&] { rank.runtime().end_call(world->rank() == 0 ? "the disk is full" : ""); }),
        world->rank() == 0 ? testing::Matcher<std::string>(IsEmpty())
                           : HasSubstr("rank 0: the disk is full"));
    rank.backward(0);
    rank.step();
    EXPECT_THAT(thrown_by([&] {
                  rank.runtime().release([&] {
                    if (world->rank() == 2) throw std::bad_alloc();
                  });
                }),
                HasSubstr(world->rank() == 2 ? "" : "rank 2: "));
    rank.backward(1);
    rank.step();
    rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

class DifferentWrites : public testing::TestWithParam<unsigned> {};

TEST_P(DifferentWrites, AreAnErrorOfWhateverTakesThemOutOfTheEngine) {
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank rank(plain(GetParam()), world);
    rank.attach();
    rank.backward(0);
    rank.step();
    if (rank.rank() == 1) rank.write(1, 5);
    const std::string who =
        "parameter 'page 1' was written in place on rank 1 since the last step(), and not on ranks "
        "0, 2: ";
    EXPECT_THAT(thrown_by([&] { rank.runtime().begin_call("save_pretrained"); }),
                AllOf(HasSubstr(who), HasSubstr("call save_pretrained() again")));
    EXPECT_THAT(thrown_by([&] { rank.runtime().release([] {}); }),
                AllOf(HasSubstr(who), HasSubstr("call release() again")));
    rank.runtime().barrier();
    if (rank.rank() != 1) rank.write(1, 5);
    rank.runtime().begin_call("save_pretrained");
    rank.runtime().end_call("");
    rank.backward(1);
    rank.step();
    if (rank.rank() == 0) {
      rank.write(2, 7);
      rank.write(2, -7);  // put back: it counts as not written
    }
    rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

TEST_P(DifferentWrites, OnAllRanksAreAnErrorThatNamesThoseThatDiffer) {
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank rank(plain(GetParam()), world);
    rank.attach();
    rank.backward(0);
    rank.step();
    rank.write(0, 3);
    rank.write(2, rank.rank() == 1 ? 5 : 6);
    const std::string who =
        "parameter 'page 2' was written in place on all ranks since the last step(), with other "
        "values on rank 1 than on rank 0: make the same write on every rank and call ";
    EXPECT_THAT(thrown_by([&] { rank.step(); }), HasSubstr(who + "step() again"));
    EXPECT_THAT(thrown_by([&] { rank.runtime().begin_call("save_pretrained"); }),
                HasSubstr(who + "save_pretrained() again"));
    EXPECT_THAT(thrown_by([&] { rank.runtime().release([] {}); }),
                HasSubstr(who + "release() again"));
    if (rank.rank() == 1) rank.write(2, 1);
    rank.backward(1);
    rank.step();
    rank.write(2, rank.rank() == 1 ? 5 : 6);
    rank.backward(2);  // updates of the others begin in it
    EXPECT_THAT(thrown_by([&] { rank.step(); }), HasSubstr(who + "step() again"));
    if (rank.rank() == 1) rank.write(2, 1);
    rank.step();
    rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

INSTANTIATE_TEST_SUITE_P(Zero, DifferentWrites, testing::Range(0U, 4U),
                         testing::PrintToStringParamName());

/// Rank 1 has one batch, the others go on and halve the rate after each step.
std::vector<Bits> train_unevenly(unsigned zero, bool joins, bool chatty) {
  std::vector<std::vector<Bits>> seen(3);
  const auto ended = run_ranks(3, [&](auto world) {
    SmallRank::Options mine = plain(zero);
    mine.dtype = kernels::Dtype::BF16;
    mine.optimizer = AdamW{.lr = 0.5};
    mine.config.early_updates = !chatty;  // those use gradients up
    SmallRank rank(mine, world);
    rank.attach();
    double lr = 0.5;
    for (int step = 0; step < 5; ++step) {
      const bool out = world->rank() == 1 && step > 0;
      if (out && joins) {
        rank.join();
        break;
      }
      if (chatty && !(world->rank() == 1)) {
        rank.backward(100 + step, false);
        rank.runtime().zero_grad();
      } else if (chatty && !joins) {
        rank.runtime().zero_grad();
      } else if (chatty && step == 0) {
        rank.runtime().zero_grad();
      }
      if (!out) rank.backward(step);
      if (chatty && step > 0) {
        rank.runtime().grad_norm();
        std::vector<float> to(rank.page(1).elements);
        rank.runtime().read_gradient(rank.page(1), to);
      }
      rank.step();
      rank.runtime().set_learning_rate(0, lr /= 2);
    }
    if (joins && world->rank() != 1) rank.join();
    seen[static_cast<std::size_t>(world->rank())] = rank.release();
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[0], seen[2]);
  return seen[0];
}

TEST(JoinedRank, TakesTheOthersRates) {
  for (const unsigned zero : {0U, 1U, 3U}) {
    EXPECT_EQ(train_unevenly(zero, true, false), train_unevenly(zero, false, false)) << zero;
  }
}

TEST(JoinedRank, FollowsWhateverTheOthersDo) {
  for (const unsigned zero : {0U, 2U, 3U}) {
    EXPECT_EQ(train_unevenly(zero, true, true), train_unevenly(zero, false, true)) << zero;
  }
}

class ReleasedRanks : public testing::TestWithParam<unsigned> {};

TEST_P(ReleasedRanks, KeepTheirPagesUntilAllHaveCopiedThem) {
  for (int turn = 0; turn < 30; ++turn) {
    std::vector<std::vector<Bits>> seen(3);
    const auto ended = run_ranks(3, [&](auto world) {
      SmallRank rank(plain(GetParam()), world);
      rank.attach();
      rank.backward(turn);
      rank.step();
      if (world->rank() == turn % 3) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      seen[static_cast<std::size_t>(world->rank())] = rank.release();
    });
    ASSERT_THAT(ended, Each(IsEmpty())) << turn;
    ASSERT_EQ(seen[0], seen[1]);
    ASSERT_EQ(seen[0], seen[2]);
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, ReleasedRanks, testing::Values(0U, 1U, 2U, 3U),
                         testing::PrintToStringParamName());

TEST(IdleRank, IsReportedWithWhereEachIs) {
  const log::Capture quiet([](auto, const auto&) {});
  for (const bool in_step : {true, false}) {
    const auto ended = run_ranks(2, [&](auto world) {
      SmallRank::Options mine = plain();
      mine.config.timeout = 0.5;
      SmallRank rank(mine, world);
      rank.attach();
      rank.backward(0);
      rank.step();
      if (world->rank() == 1) {
        while (!rank.runtime().failed()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        rank.runtime().check();
      }
      if (!in_step) {
        rank.backward(1);
        while (!rank.runtime().failed()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      rank.step();
    });
    EXPECT_THAT(ended,
                Each(AllOf(HasSubstr(in_step ? "rank 0 is in step() 2"
                                             : "rank 0 is in backward() of step 2"),
                           HasSubstr("rank 1, which is alive and outside of the engine, after "
                                     "step() 1"),
                           HasSubstr("timeout"))));
  }
}

TEST(SlowRank, IsNoErrorWhileItComputesOrUsesItsPages) {
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine = plain();
    mine.config.timeout = 0.4;
    SmallRank rank(mine, world);
    rank.attach();
    for (int step = 0; step < 3; ++step) {
      const Stopwatch watch;
      while (world->rank() == 1 && watch.seconds() < 1.5) {
        if (step == 0) (void)rank.values();  // by operators, now and then
        if (step == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      rank.backward(step);
      if (world->rank() == 0 && step == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      rank.step();
    }
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

TEST(EndedRank, ServesTheOthersUntilTheyEnd) {
  const auto ended = run_ranks(2, [&](auto world) {
    SmallRank::Options mine = plain();
    mine.config.timeout = 0.4;
    SmallRank rank(mine, world);
    rank.attach();
    rank.backward(0);
    rank.step();
    if (world->rank() == 0) return;
    for (const Stopwatch watch; watch.seconds() < 1.5;) {
      (void)rank.values();
      for (int p = 0; p < 3; ++p)
        rank.runtime().pager().evict(rank.page(static_cast<std::size_t>(p)));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  EXPECT_THAT(ended, Each(IsEmpty()));
}

/// A world whose groups fail to be made from one of them on.
class BrokenWorld final : public comm::World {
 public:
  BrokenWorld(std::shared_ptr<World> inner, int good) : inner_(std::move(inner)), good_(good) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  std::unique_ptr<comm::Group> make_group(std::string name) override {
    if (made_++ >= good_) throw EngineError("no cable for " + name);
    return inner_->make_group(std::move(name));
  }
  void put(std::string_view key, std::string_view value) override { inner_->put(key, value); }
  std::optional<std::string> get(std::string_view key) override { return inner_->get(key); }

 private:
  const std::shared_ptr<World> inner_;
  const int good_;
  int made_ = 0;
};

TEST(Runtime, ThatCannotBeMadeEndsItsThreadsAndTellsTheOthers) {
  const log::Capture quiet([](auto, const auto&) {});
  for (int good = 0; good < 4; ++good) {
    const auto ended = run_ranks(2, [&](std::shared_ptr<comm::World> world) {
      if (world->rank() == 1) world = std::make_shared<BrokenWorld>(world, good);
      SmallRank rank(plain(), world);
      rank.attach();
      FAIL() << "rank 1 has no engine";
    });
    EXPECT_THAT(ended, Each(HasSubstr("no cable for")));
    EXPECT_THAT(ended[0], HasSubstr("rank 1 failed"));
  }
}

}  // namespace
}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/watch.h"

#include <algorithm>
#include <atomic>
#include <future>

#include <gmock/gmock.h>

#include "unit/comm/world_case.h"

namespace pagoda::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

struct Report {
  int rank = -2;
  std::string reason;
};

class WatchTest : public OnWorlds {
 protected:
  /// Only where no rank has to be on time: the others have left.
  static constexpr milliseconds kTimeout{100};

  struct Watched {
    std::promise<Report> promise;
    std::future<Report> report = promise.get_future();
    std::unique_ptr<Watch> watch;
    int reports = 0;
  };

  void watch(int rank, milliseconds timeout) {
    Watched& watched = watched_[static_cast<std::size_t>(rank)];
    watched.watch = std::make_unique<Watch>(
        world(rank), Watch::Options{.interval = milliseconds(5), .timeout = timeout},
        [&watched](int lost, std::string reason) {
          if (watched.reports++ == 0) watched.promise.set_value({lost, std::move(reason)});
        });
  }

  void SetUp() override {
    OnWorlds::SetUp();
    watched_ = std::vector<Watched>(worlds_.size());
  }

  void TearDown() override {
    for (Watched& watched : watched_) {
      watched.watch.reset();
      EXPECT_LE(watched.reports, 1);
    }
  }

  void leave_at_once(int rank) {
    watch(rank, std::chrono::hours(1));
    watched(rank).watch->leave();
    watched(rank).watch.reset();
  }

  Watched& watched(int rank) { return watched_[static_cast<std::size_t>(rank)]; }

  bool reported(int rank) {
    return watched(rank).report.wait_for(milliseconds(0)) == std::future_status::ready;
  }

  std::vector<Watched> watched_;
};

TEST_P(WatchTest, ASilentRankIsReported) {
  if (ranks() == 1) return;
  const int silent = ranks() - 1;  // never watches, so never beats
  for (int r = 1; r < silent; ++r) leave_at_once(r);
  watch(0, kTimeout);
  const Report report = watched(0).report.get();
  EXPECT_EQ(report.rank, silent);
  EXPECT_EQ(report.reason, "rank " + std::to_string(silent) +
                               " has not answered for 0.1 s (killed, or its machine is gone)");
}

TEST_P(WatchTest, ARankThatStopsBeatingIsReported) {
  if (ranks() == 1) return;
  for (int r = 1; r < ranks() - 1; ++r) leave_at_once(r);
  const std::string key = "watch/" + std::to_string(ranks() - 1);
  world(0).put(key, "b1");
  watch(0, kTimeout);
  world(0).put(key, "b2");
  EXPECT_EQ(watched(0).report.get().rank, ranks() - 1);
}

TEST_P(WatchTest, AFailureIsReportedWithItsText) {
  const int failing = ranks() / 2;
  for (int r = 0; r < ranks(); ++r) watch(r, std::chrono::hours(1));
  watched(failing).watch->fail("its disk is full");
  watched(failing).watch->fail("and more");
  for (int r = 0; r < ranks(); ++r) {
    if (r == failing) continue;
    const Report report = watched(r).report.get();
    EXPECT_EQ(report.rank, failing);
    EXPECT_EQ(report.reason, "rank " + std::to_string(failing) + " failed: its disk is full");
    watched(r).watch->fail("because of it");  // not the cause: nobody is told
    EXPECT_EQ(world(r).get("watch/" + std::to_string(r))->front(), 'b');
  }
  EXPECT_FALSE(reported(failing));
}

TEST_P(WatchTest, NotesTravelWithBeats) {
  if (ranks() == 1) return;
  std::atomic<int> turn = 0;
  std::promise<std::vector<PeerNote>> seen;
  for (int r = 0; r < ranks(); ++r) {
    Watch::Options options{.interval = milliseconds(5), .timeout = std::chrono::hours(1)};
    options.note = [r, &turn] { return fmt::format("rank {} turn {}", r, turn.load()); };
    if (r == 0) {
      options.on_notes = [&, told = false](std::span<const PeerNote> notes) mutable {
        const bool all = std::all_of(notes.begin(), notes.end(), [](const PeerNote& peer) {
          return peer.note == fmt::format("rank {} turn 1", peer.rank);
        });
        const bool still = std::all_of(notes.begin(), notes.end(), [](const PeerNote& peer) {
          return peer.unchanged > 20'000'000;
        });
        if (!all) turn = 1;
        if (all && still && !std::exchange(told, true))
          seen.set_value({notes.begin(), notes.end()});
      };
    }
    watched(r).watch = std::make_unique<Watch>(world(r), options, [](int, const std::string&) {});
  }
  EXPECT_EQ(seen.get_future().get().size(), static_cast<std::size_t>(ranks() - 1));
  for (int r = 0; r < ranks(); ++r) watched(r).watch->leave();
  for (int r = 0; r < ranks(); ++r) watched(r).watch.reset();  // they use what is in here
}

TEST_P(WatchTest, ARankThatNeverCameMayHaveSaidWhy) {
  if (ranks() == 1) return;
  for (int r = 1; r < ranks() - 1; ++r) leave_at_once(r);
  Watch::fail(world(ranks() - 1), "watch", "there is no disk");
  watch(0, std::chrono::hours(1));
  EXPECT_EQ(watched(0).report.get().reason,
            "rank " + std::to_string(ranks() - 1) + " failed: there is no disk");
}

TEST_P(WatchTest, ARankThatLeavesIsNotMissed) {
  watch(0, kTimeout);
  for (int r = 1; r < ranks(); ++r) leave_at_once(r);
  std::this_thread::sleep_for(kTimeout * 2);
  EXPECT_FALSE(reported(0)) << watched(0).report.get().reason;
  watched(0).watch->leave();
}

TEST_P(WatchTest, ARankThatEndsWithoutLeavingHasFailed) {
  if (ranks() == 1) return;
  for (int r = 0; r < ranks(); ++r) watch(r, std::chrono::hours(1));
  watched(1).watch.reset();
  const Report report = watched(0).report.get();
  EXPECT_EQ(report.rank, 1);
  EXPECT_THAT(report.reason, HasSubstr("rank 1 failed: it ended without a word"));
}

TEST_P(WatchTest, AWatchThatLeftReportsNothing) {
  if (ranks() == 1) return;
  for (int r = 0; r < ranks(); ++r) watch(r, std::chrono::hours(1));
  watched(0).watch->leave();
  watched(1).watch->fail("late");
  for (int r = 2; r < ranks(); ++r) watched(r).report.wait();
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_FALSE(reported(0));
}

TEST_P(WatchTest, AReportMayEndWhatIsBlocked) {
  if (ranks() == 1) return;
  const auto groups = make_groups("blocked");
  Watch zero(world(0), {.interval = milliseconds(5), .timeout = std::chrono::hours(1)},
             [&](int, std::string reason) { groups[0]->abort(std::move(reason)); });
  Watch one(world(1), {.interval = milliseconds(5), .timeout = std::chrono::hours(1)},
            [](int, const std::string&) {});
  std::thread failing([&] { one.fail("out of memory"); });
  EXPECT_THAT([&] { groups[0]->barrier(); },
              ::testing::ThrowsMessage<GroupAborted>(HasSubstr("rank 1 failed: out of memory")));
  failing.join();
}

TEST_P(WatchTest, RefusesATimeOutWithinAnInterval) {
  EXPECT_THROW(Watch(world(0), {.interval = milliseconds(5), .timeout = milliseconds(5)},
                     [](int, const std::string&) {}),
               UserError);
}

/// A world whose board is lost.
class BoardlessWorld final : public World {
 public:
  int rank() const noexcept override { return 1; }
  int size() const noexcept override { return 2; }
  std::unique_ptr<Group> make_group(std::string) override { return nullptr; }
  void put(std::string_view, std::string_view) override { throw EngineError("connection reset"); }
  std::optional<std::string> get(std::string_view) override { return std::nullopt; }
  int board_rank() const noexcept override { return 0; }
};

TEST(WatchOfALostBoard, NamesTheRankThatHeldIt) {
  BoardlessWorld world;
  std::promise<Report> promise;
  Watch watch(world, {.interval = milliseconds(5), .timeout = std::chrono::hours(1)},
              [&](int rank, std::string reason) {
                promise.set_value({rank, std::move(reason)});
              });
  const Report report = promise.get_future().get();
  EXPECT_EQ(report.rank, 0);
  EXPECT_THAT(report.reason, AllOf(HasSubstr("rank 0, which has the store, was killed"),
                                   HasSubstr("connection reset")));
}

INSTANTIATE_TEST_SUITE_P(Worlds, WatchTest, ::testing::ValuesIn(world_cases()), world_case_name);

}  // namespace
}  // namespace pagoda::comm

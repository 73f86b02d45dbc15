// SPDX-License-Identifier: Apache-2.0
// What a rank says of the others while it joins them; the others are notes on a board.
#include "pagoda/torch/join.h"

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Logging.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <unistd.h>

#include "pagoda/base/process_mark.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/torch/attempt.h"
#include "pagoda/torch/gloo_world.h"
#include "pagoda/torch/quiet_torch_log.h"
#include "pagoda/torch/store_board.h"

namespace pagoda::torch {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr milliseconds kLong{100'000};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

/// The mark of a process that is gone.
std::string ended_process() {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string mark = process_mark();
    ::_exit(::write(ends[1], mark.data(), mark.size()) < 0 ? 1 : 0);
  }
  char text[200];
  const ssize_t length = ::read(ends[0], text, sizeof(text));
  ::waitpid(child, nullptr, 0);
  ::close(ends[0]);
  ::close(ends[1]);
  return {text, static_cast<std::size_t>(length)};
}

// These come first: later tests leave threads behind, too.

TEST(QuietTorchLogTest, LingersForAsLongAsIsSaidAndNoLonger) {
  const std::atomic_ref<int> level(FLAGS_caffe2_log_level);
  const int before = level.load();
  {
    QuietTorchLog quiet;
    quiet.linger(milliseconds(200));
    EXPECT_NE(level.load(), before);
  }
  EXPECT_NE(level.load(), before);
  { const QuietTorchLog another; }
  EXPECT_NE(level.load(), before);
  while (level.load() != before) std::this_thread::sleep_for(milliseconds(10));
}

/// It never answers, until the test is over.
class StuckStore final : public ::c10d::HashStore {
 public:
  explicit StuckStore(std::shared_future<void> over) : over_(std::move(over)) {}

  bool check(const std::vector<std::string>& keys) override {
    over_.wait();
    return HashStore::check(keys);
  }

 private:
  const std::shared_future<void> over_;
};

TEST(StoreBoardTest, WhatItsThreadIsStuckInIsNotHeard) {
  const std::atomic_ref<int> level(FLAGS_caffe2_log_level);
  const int before = level.load();
  std::promise<void> over;
  {
    StoreBoard board(c10::make_intrusive<StuckStore>(over.get_future().share()), milliseconds(100));
    EXPECT_THAT(error_of([&] { board.get("a"); }), HasSubstr("has not answered for 0.1 s"));
  }
  EXPECT_NE(level.load(), before);  // …and for a minute from now
  over.set_value();
}

class JoinTest : public ::testing::Test {
 protected:
  void begin(milliseconds limit) { join_.begin(kLong, JoinDeadline(limit)); }
  void put_of_rank_1(const std::string& process, const std::string& beat) {
    worlds_[1]->put("joins/1", process + "\n" + beat);
  }

  std::vector<std::shared_ptr<comm::World>> worlds_ = comm::make_thread_worlds(2);
  Join join_{*worlds_[0], ""};
};

TEST_F(JoinTest, ARankThatNeverComesIsNamedAtTheDeadline) {
  begin(milliseconds(100));
  EXPECT_THAT(error_of([&] { join_.meet("a"); }),
              HasSubstr("rank 1 has not come to connect with the others for 0.1 s"));
}

TEST_F(JoinTest, OneDeadlineIsForAllThatIsWaitedFor) {
  begin(milliseconds(300));
  worlds_[1]->put("a/here/1", "");
  join_.meet("a");
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_THAT(error_of([&] { join_.meet("b"); }), HasSubstr("rank 1 has not come"));
}

TEST_F(JoinTest, ARankWhoseProcessHasEndedIsNamedBeforeTheDeadline) {
  begin(kLong);
  put_of_rank_1(ended_process(), "3");
  EXPECT_THAT(error_of([&] { join_.meet("a"); }),
              HasSubstr("rank 1 was killed or ended while rank 0 was joining"));
}

TEST_F(JoinTest, WhatARankSaidBeforeItEndedIsTold) {
  begin(kLong);
  put_of_rank_1(ended_process(), "3");
  worlds_[1]->put("gave up", "rank 1 failed: no memory");
  EXPECT_THAT(error_of([&] { join_.meet("a"); }), HasSubstr("rank 1 failed: no memory"));
}

TEST_F(JoinTest, ASilentRankIsNamedAtTheDeadline) {
  begin(milliseconds(1500));
  put_of_rank_1("another-machine/1 7 7", "3");
  const auto connects = [] {
    std::this_thread::sleep_for(milliseconds(3000));
    return 0;
  };
  EXPECT_THAT(error_of([&] { attempt<int>(connects, [&] { join_.look(); }); }),
              AllOf(HasSubstr("rank 1 has not answered for"), HasSubstr("while rank 0 was")));
}

TEST_F(JoinTest, AConnectionThatBreaksIsTheFaultOfWhoIsSilentThen) {
  begin(kLong);
  put_of_rank_1("another-machine/1 7 7", "3");
  EXPECT_THAT(error_of([&] { join_.find_lost_rank(); }), HasSubstr("rank 1 was killed or ended"));
}

TEST_F(JoinTest, ConnectionsThatFailBetweenRanksThatLiveAreNobodysFault) {
  begin(kLong);
  Join other(*worlds_[1], "");
  other.begin(kLong, JoinDeadline(kLong));
  std::jthread beats([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      other.look();
      std::this_thread::sleep_for(milliseconds(20));
    }
  });
  EXPECT_THAT(error_of([&] { join_.find_lost_rank(); }), HasSubstr("though all are there"));
}

TEST_F(JoinTest, AnInterruptEndsTheWait) {
  begin(kLong);
  std::jthread interrupts([] {
    std::this_thread::sleep_for(milliseconds(100));
    interrupt_joins();
  });
  EXPECT_THAT(error_of([&] { join_.meet("a"); }),
              HasSubstr("interrupted while it waited for rank 1 to connect"));
}

TEST_F(JoinTest, AProcessThatWasMetBeforeAndHasEndedIsNotWaitedFor) {
  const std::string place = "here";
  {
    Join first(*worlds_[0], place);
    first.begin(kLong, JoinDeadline(kLong));
    put_of_rank_1(ended_process(), "done");
    first.finish();
  }
  const auto second = comm::make_thread_worlds(2);
  const auto meet = [&] {
    Join join(*second[0], place);
    join.begin(kLong, JoinDeadline(milliseconds(200)));
    join.meet("a");
  };
  EXPECT_THAT(error_of(meet), HasSubstr("rank 1 was killed or ended"));
  second[1]->put("joins/1", "another-machine/1 7 7\nbusy");  // another process comes in its place
  EXPECT_THAT(error_of(meet), HasSubstr("rank 1 has not come"));
  Join::forget(place);
  EXPECT_THAT(error_of(meet), HasSubstr("rank 1 has not come"));
}

TEST(JoinOfThree, ARankThatIsBusyIsNotBlamedForOneThatNeverComes) {
  const auto worlds = comm::make_thread_worlds(3);
  Join join(*worlds[0], "");
  join.begin(kLong, JoinDeadline(milliseconds(300)));
  worlds[2]->put("joins/2", "another-machine/1 7 7\nbusy");  // its engine is not there yet
  EXPECT_THAT(error_of([&] { join.meet("a"); }), HasSubstr("rank 1 has not come"));
}

TEST(JoinOfWorlds, TheLastExchangeIsUnderTheSameDeadline) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  std::vector<std::shared_ptr<comm::World>> worlds;
  for (int r = 0; r < 2; ++r) {
    worlds.push_back(world_from_store(store, r, 2, {.address = "127.0.0.1"}));
    worlds.back()->begin_join(kLong, milliseconds(3000));
  }
  std::unique_ptr<comm::Group> other;
  std::jthread rank_1([&] { other = worlds[1]->make_group("control"); });
  const auto group = worlds[0]->make_group("control");
  rank_1.join();
  EXPECT_THAT(error_of([&] {
                worlds[0]->finish_join([&] { group->barrier(); },
                                       [&](const std::string& why) { group->abort(why); });
              }),
              HasSubstr("rank 1 has not answered for"));
}

}  // namespace
}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/thread_pool.h"

#include <atomic>
#include <latch>
#include <numeric>
#include <set>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

/// Stacks that no machine has room for, while it lives: a thread cannot be started.
class NoThreads {
 public:
  NoThreads() {
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    ::pthread_attr_init(&huge);
    ::pthread_attr_setstacksize(&huge, std::size_t{1} << 47);
    ::pthread_setattr_default_np(&huge);
    ::pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST(ThreadPool, AThreadThatCannotBeStartedSaysWhichLimitsThereAre) {
  std::string said;
  {
    const NoThreads limited;
    try {
      const ThreadPool pool(2, "none");
    } catch (const EngineError& error) {
      said = error.what();
    }
  }
  EXPECT_THAT(said, ::testing::AllOf(::testing::HasSubstr("no thread can be started"),
                                     ::testing::HasSubstr("ulimit -"),
                                     ::testing::HasSubstr("lower fetch_threads")));
}

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ThreadPool, CarriesResultsAndExceptionsToTheWaiter) {
  ThreadPool pool(2, "test");
  EXPECT_EQ(pool.submit([] { return 42; }).get(), 42);
  pool.submit([] {}).get();
  auto failing = pool.submit([]() -> int { throw std::runtime_error("boom"); });
  EXPECT_THROW(failing.get(), std::runtime_error);
  EXPECT_EQ(pool.submit([] { return 1; }).get(), 1) << "a thread survives a task that throws";
}

TEST(ThreadPool, AcceptsMoveOnlyTasks) {
  ThreadPool pool(1, "test");
  auto value = std::make_unique<int>(7);
  EXPECT_EQ(pool.submit([v = std::move(value)] { return *v; }).get(), 7);
}

TEST(ThreadPool, UrgentOvertakesNormalOvertakesBackground) {
  ThreadPool pool(1, "test");
  std::latch queued(1);
  auto first = pool.submit([&] { queued.wait(); });
  std::vector<std::string> order;  // written by the pool's only thread
  std::vector<std::future<void>> all;
  const auto add = [&](const char* name, Priority priority) {
    all.push_back(pool.submit([&order, name] { order.push_back(name); }, priority));
  };
  add("background 1", Priority::Background);
  add("normal 1", Priority::Normal);
  add("background 2", Priority::Background);
  add("urgent 1", Priority::Urgent);
  add("normal 2", Priority::Normal);
  add("urgent 2", Priority::Urgent);
  queued.count_down();
  for (auto& future : all) future.get();
  EXPECT_THAT(order, ElementsAre("urgent 1", "urgent 2", "normal 1", "normal 2", "background 1",
                                 "background 2"));
}

TEST(ThreadPool, CancelTellsEveryWaiter) {
  std::vector<std::future<void>> waiting;
  std::latch started(1);
  std::latch go(1);
  std::future<void> running;
  auto pool = std::make_unique<ThreadPool>(1, "short-lived");
  running = pool->submit([&] {
    started.count_down();
    go.wait();
  });
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) waiting.push_back(pool->submit([&] { ran.fetch_add(1); }));
  started.wait();
  std::jthread stopper([&] { pool.reset(); });
  for (auto& future : waiting) {
    try {
      future.get();
      FAIL() << "a cancelled task ran";
    } catch (const EngineError& e) {
      EXPECT_THAT(e.what(), HasSubstr("'short-lived' was stopped before this task ran"));
    }
  }
  go.count_down();
  running.get();  // what had started was allowed to finish
  EXPECT_EQ(ran.load(), 0);
}

TEST(ThreadPool, DrainRunsWhatIsQueued) {
  ThreadPool pool(2, "test");
  std::atomic<int> ran{0};
  std::vector<std::future<void>> all;
  for (int i = 0; i < 100; ++i) {
    all.push_back(pool.submit([&] { ran.fetch_add(1); }, Priority::Background));
  }
  pool.stop(ThreadPool::Stop::Drain);
  EXPECT_EQ(ran.load(), 100);
  EXPECT_THROW((void)pool.submit([] {}), EngineError);
  EXPECT_THROW(pool.parallel_for(0, 10, 1, [](auto, auto) {}), EngineError);
  pool.stop(ThreadPool::Stop::Cancel);  // again: nothing to do
}

TEST(ThreadPool, NeedsAThread) {
  EXPECT_THROW(ThreadPool(0, "none"), UserError);
}

TEST(ParallelFor, CoversEveryElementOnce) {
  ThreadPool pool(3, "test");
  for (const std::size_t count : {0U, 1U, 7U, 64U, 1000U}) {
    for (const std::size_t grain : {1U, 3U, 64U, 5000U}) {
      std::vector<std::atomic<int>> hits(count + 5);
      pool.parallel_for(5, 5 + count, grain, [&](std::size_t begin, std::size_t end) {
        EXPECT_LE(end - begin, grain);
        EXPECT_EQ((begin - 5) % grain, 0U) << "cuts do not depend on the threads";
        for (std::size_t i = begin; i < end; ++i) hits[i].fetch_add(1);
      });
      for (std::size_t i = 0; i < hits.size(); ++i) EXPECT_EQ(hits[i].load(), i < 5 ? 0 : 1);
    }
  }
  EXPECT_THROW(pool.parallel_for(0, 1, 0, [](auto, auto) {}), UserError);
}

TEST(ParallelFor, HandlesTheEndOfTheIndexSpace) {
  ThreadPool pool(2, "test");
  constexpr std::size_t kEnd = std::numeric_limits<std::size_t>::max();
  std::atomic<std::size_t> covered{0};
  pool.parallel_for(kEnd - 10, kEnd, 4,
                    [&](std::size_t begin, std::size_t end) { covered.fetch_add(end - begin); });
  EXPECT_EQ(covered.load(), 10U);
}

TEST(ParallelFor, NestsWithoutDeadlock) {
  ThreadPool pool(2, "test");
  std::atomic<int> leaves{0};
  pool.parallel_for(0, 8, 1, [&](auto, auto) {
    pool.parallel_for(0, 8, 1, [&](auto, auto) { leaves.fetch_add(1); });
  });
  EXPECT_EQ(leaves.load(), 64);
}

TEST(ParallelFor, RunsWhileEveryThreadIsBusy) {
  ThreadPool pool(1, "test");
  std::latch release(1);
  auto blocked = pool.submit([&] { release.wait(); });
  int sum = 0;  // the caller works alone, so there is no race
  pool.parallel_for(0, 10, 1, [&](std::size_t i, auto) { sum += static_cast<int>(i); });
  EXPECT_EQ(sum, 45);
  release.count_down();
  blocked.get();
}

TEST(ParallelFor, RethrowsTheLowestPieceAndSkipsTheRest) {
  ThreadPool pool(2, "test");
  for (int round = 0; round < 20; ++round) {
    std::latch both(2);
    std::atomic<int> ran{0};
    try {
      pool.parallel_for(0, 10'000, 1, [&](std::size_t i, auto) {
        ran.fetch_add(1);
        if (i < 2) {
          both.arrive_and_wait();  // pieces 0 and 1 run at once, then both throw
          throw std::runtime_error("piece " + std::to_string(i));
        }
        // A third thread leaves them time to throw: it could run all the rest before.
        both.wait();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      });
      FAIL() << "the exception was lost";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "piece 0");
    }
    EXPECT_LT(ran.load(), 10'000);
  }
}

}  // namespace
}  // namespace pagoda

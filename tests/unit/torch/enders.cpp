// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/enders.h"

#include <atomic>
#include <barrier>
#include <latch>
#include <memory>
#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace pagoda::torch {
namespace {

/// Says on which thread it has ended.
struct Ending {
  explicit Ending(std::atomic<std::thread::id>& where) : where(where) {}
  ~Ending() {
    where = std::this_thread::get_id();
    where.notify_all();
  }
  std::atomic<std::thread::id>& where;
};

/// Says that its end has begun, and waits until it may go on.
struct LongEnding {
  LongEnding(std::latch& begun, std::latch& may_end) : begun(begun), may_end(may_end) {}
  ~LongEnding() {
    begun.count_down();
    may_end.wait();
  }
  std::latch& begun;
  std::latch& may_end;
};

std::thread::id wait_for(std::atomic<std::thread::id>& where) {
  where.wait(std::thread::id());
  return where;
}

TEST(Enders, WhoeverLetsGoLastDoesNotWait) {
  Enders& enders = Enders::instance();
  // Both may see the other's reference and still be the last: neither may end it.
  for (int turn = 0; turn < 500; ++turn) {
    std::atomic<std::thread::id> where{};
    auto first = enders.share(std::make_unique<Ending>(where));
    auto second = first;
    std::barrier both(2);
    std::jthread one([&] {
      both.arrive_and_wait();
      first.reset();
    });
    std::jthread two([&] {
      both.arrive_and_wait();
      second.reset();
    });
    const std::set droppers{one.get_id(), two.get_id(), std::this_thread::get_id()};
    EXPECT_FALSE(droppers.contains(wait_for(where)));
  }
}

TEST(Enders, EndsAtOnceWhereThatIsAllowed) {
  std::atomic<std::thread::id> where{};
  auto last = Enders::instance().share(std::make_unique<Ending>(where));
  {
    const Enders::EndsHere here;
    last.reset();
  }
  EXPECT_EQ(where.load(), std::this_thread::get_id());
}

TEST(Enders, WhatIsStillNeededEndsLaterAndElsewhere) {
  std::atomic<std::thread::id> where{};
  auto engine = Enders::instance().share(std::make_unique<Ending>(where));
  auto pin = engine;
  {
    const Enders::EndsHere here;
    engine.reset();
  }
  EXPECT_EQ(where.load(), std::thread::id());
  pin.reset();
  EXPECT_NE(wait_for(where), std::this_thread::get_id());
}

TEST(Enders, NothingEndsAfterTheStop) {
  Enders enders;
  std::atomic<std::thread::id> before{};
  std::atomic<std::thread::id> after{};
  auto ends = enders.share(std::make_unique<Ending>(before));
  auto stays = enders.share(std::make_unique<Ending>(after));
  Ending* const leaked = stays.get();
  ends.reset();
  enders.stop();
  EXPECT_NE(before.load(), std::thread::id());  // it was waited for
  stays.reset();
  EXPECT_EQ(after.load(), std::thread::id());
  delete leaked;
}

/// What the child does; its exit code says where it went wrong.
int child_part(Enders& of_parent) {
  ::alarm(8);  // less than stop() waits for threads that do not end
  of_parent.stop();
  // It may have engines of its own, which end here.
  std::atomic<std::thread::id> where{};
  {
    const Enders::EndsHere here;
    Enders::instance().share(std::make_unique<Ending>(where)).reset();
  }
  if (where.load() != std::this_thread::get_id()) return 1;
  Enders::instance().stop();
  return 0;
}

TEST(Enders, AForkedChildDoesNotWaitForTheThreadsOfItsParent) {
  Enders enders;
  static_cast<void>(Enders::instance());  // the child has this one, too
  std::latch begun(1);
  std::latch may_end(1);
  enders.share(std::make_unique<LongEnding>(begun, may_end)).reset();
  begun.wait();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(child_part(enders));
  int status = -1;
  const pid_t ended = ::waitpid(child, &status, 0);
  may_end.count_down();
  enders.stop();
  ASSERT_EQ(ended, child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace pagoda::torch

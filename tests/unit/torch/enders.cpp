// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/enders.h"

#include <atomic>
#include <barrier>
#include <memory>
#include <set>
#include <thread>

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/failure.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/log.h"
#include "pagoda/comm/comm_error.h"
#include "pagoda/comm/thread_world.h"

namespace pagoda::engine {
namespace {

using ::testing::HasSubstr;

std::exception_ptr error(const std::string& text) {
  return std::make_exception_ptr(EngineError(text));
}

std::string thrown_by_check(const Failure& failure) {
  try {
    failure.check();
    return "";
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
}

class FailureTest : public testing::Test {
 protected:
  std::vector<std::shared_ptr<comm::World>> worlds_ = comm::make_thread_worlds(3);
  const log::Capture quiet_{[](auto, const auto&) {}};
};

TEST_F(FailureTest, TheFirstErrorIsToldOnceToThoseThatListenAndThoseThatComeLater) {
  Failure failure(*worlds_[0], "engine");
  std::vector<std::string> told;
  failure.listen([&](const auto&, const std::string& why) { told.push_back("early " + why); });
  EXPECT_NO_THROW(failure.check());
  failure.fail(error("first"));
  failure.fail(error("second"));
  EXPECT_THAT(thrown_by_check(failure), HasSubstr("first"));
  failure.listen([&](const auto&, const std::string& why) { told.push_back("late " + why); });
  EXPECT_THAT(told, testing::ElementsAre("early first", "late first"));
}

TEST_F(FailureTest, NobodyIsToldAfterItHasClosed) {
  Failure failure(*worlds_[0], "engine");
  int told = 0;
  failure.listen([&](const auto&, const auto&) { ++told; });
  { const Failure::Closing closing(failure); }
  failure.fail(error("late"));
  EXPECT_EQ(told, 0);
  EXPECT_FALSE(failure.failed());
}

TEST_F(FailureTest, OtherRanksKnowWhyAndWhereOneEnded) {
  std::vector<std::unique_ptr<Failure>> ranks;
  for (const auto& world : worlds_) ranks.push_back(std::make_unique<Failure>(*world, "engine"));
  EXPECT_EQ(ranks[0]->fate_of(1), std::nullopt);
  EXPECT_EQ(ranks[0]->describe(1, "what is known"), "what is known");
  ranks[2]->post_end("in close() after step() 4");
  EXPECT_EQ(ranks[0]->fate_of(2), "rank 2 has ended its engine in close() after step() 4");
  ranks[1]->fail(error("its disk is full"));
  EXPECT_TRUE(ranks[1]->is_own());
  EXPECT_EQ(ranks[0]->fate_of(1), "rank 1 failed: its disk is full");
  // A connection that broke is not the reason: the rank at its other end has said why.
  ranks[0]->fail(std::make_exception_ptr(comm::PeerLost(1, "rank 1 closed its connection")));
  EXPECT_THAT(thrown_by_check(*ranks[0]), HasSubstr("rank 1 failed: its disk is full"));
  EXPECT_FALSE(ranks[0]->is_own());
  EXPECT_EQ(ranks[2]->fate_of(0), "rank 1 failed: its disk is full");  // not: rank 0 failed: …
  ranks[1]->wait_until_heard(std::chrono::seconds(60));                // both have: at once
}

TEST_F(FailureTest, TheRankThatFailedIsNamedAndNotOneThatHasHeardOfIt) {
  const auto lost = [](int rank) {
    return std::make_exception_ptr(
        comm::PeerLost(rank, fmt::format("rank {} closed its connection", rank)));
  };
  std::vector<std::unique_ptr<Failure>> ranks;
  const auto make = [&](const std::string& engine) {
    ranks.clear();
    for (const auto& world : worlds_) ranks.push_back(std::make_unique<Failure>(*world, engine));
  };
  // Rank 2 was killed; rank 0 noticed it first, and rank 1 loses rank 2, too.
  make("killed");
  ranks[0]->fail(lost(2));
  ranks[1]->fail(lost(2));
  EXPECT_THAT(thrown_by_check(*ranks[1]), HasSubstr("rank 2 closed its connection"));
  EXPECT_THAT(thrown_by_check(*ranks[1]), testing::Not(HasSubstr("rank 0")));
  ranks[0]->wait_until_heard(
      std::chrono::seconds(60));  // nobody waits for a rank that is gone: at once
  // Rank 1 failed, rank 0 heard of it and went; rank 2 loses rank 0.
  make("heard");
  ranks[1]->fail(error("its disk is full"));
  ranks[0]->fail(lost(1));
  ranks[2]->fail(lost(0));
  EXPECT_THAT(thrown_by_check(*ranks[2]), HasSubstr("rank 1 failed: its disk is full"));
  // The rank that was lost says it itself, whatever others have met.
  make("itself");
  ranks[0]->fail(error("of rank 0"));
  ranks[1]->fail(error("of rank 1"));
  ranks[2]->fail(lost(1));
  EXPECT_THAT(thrown_by_check(*ranks[2]), HasSubstr("rank 1 failed: of rank 1"));
}

TEST_F(FailureTest, ARefusalByARankThatHasFailedIsToldAsItsFailure) {
  Failure one(*worlds_[1], "engine");
  one.fail(error("its disk is full"));
  Failure zero(*worlds_[0], "engine");
  zero.fail(std::make_exception_ptr(comm::RemoteError(1, "its disk is full [page=w]")));
  EXPECT_THAT(thrown_by_check(zero), HasSubstr("rank 1 failed: its disk is full"));
  EXPECT_FALSE(zero.is_own());
  // Rank 2 is well, and has refused for a reason of its own.
  Failure other(*worlds_[0], "another engine");
  other.fail(std::make_exception_ptr(comm::RemoteError(2, "the page has been released")));
  EXPECT_THAT(thrown_by_check(other), HasSubstr("rank 2 could not answer: the page has been"));
}

/// What an engine is to its failure: an owner whose parts are told, made while threads fail.
struct Owner {
  explicit Owner(comm::World& world, bool throws) : failure(world, "engine") {
    thread = std::jthread([this] { failure.fail(error("of a thread that was first")); });
    for (int i = 0; i < 20; ++i) {
      parts.push_back(std::make_unique<std::atomic<int>>(0));
      failure.listen([part = parts.back().get()](const auto&, const auto&) { ++*part; });
    }
    if (throws) throw EngineError("it cannot be made");
  }

  Failure failure;
  std::jthread thread;
  std::vector<std::unique_ptr<std::atomic<int>>> parts;
  const Failure::Closing closing{failure};
};

TEST_F(FailureTest, MayComeWhileItsOwnerIsMadeAndWhileThatThrows) {
  const auto alone = comm::make_thread_worlds(1);
  for (int turn = 0; turn < 300; ++turn) {
    EXPECT_THROW(Owner(*alone[0], true), EngineError);
    Owner owner(*alone[0], false);
    owner.thread.join();
    for (const auto& part : owner.parts) EXPECT_EQ(*part, 1);
  }
}

}  // namespace
}  // namespace pagoda::engine

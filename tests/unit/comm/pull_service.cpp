// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/pull_service.h"

#include <atomic>

#include <gmock/gmock.h>

#include "unit/comm/world_case.h"

namespace pagoda::comm {
namespace {

using ::testing::HasSubstr;

/// Every rank serves kKeys arrays of kBytes. A version above `version` has to be waited for.
class PullServiceTest : public OnWorlds {
 protected:
  static constexpr std::uint64_t kKeys = 3;
  static constexpr std::size_t kBytes = 500'000;

  struct Served {
    std::mutex mutex;
    std::condition_variable_any grown;
    std::uint64_t version = 1;  // guarded by mutex
    std::atomic<int> waiting = 0;
    std::unique_ptr<PullService> service;
  };

  void SetUp() override {
    OnWorlds::SetUp();
    auto groups = make_groups("pull");
    for (int r = 0; r < ranks(); ++r) {
      served_.push_back(std::make_unique<Served>());
      Served& served = *served_.back();
      served.service = std::make_unique<PullService>(
          std::move(groups[static_cast<std::size_t>(r)]),
          [this, r](const PullRequest& request, PullReply& reply) { handle(r, request, reply); });
    }
  }

  void TearDown() override {
    // At once, as processes would: one that ended earlier is lost to the others.
    on_ranks(ranks(), [&](int r) { served_[static_cast<std::size_t>(r)]->service.reset(); });
  }

  void handle(int rank, const PullRequest& request, PullReply& reply) {
    Served& served = *served_[static_cast<std::size_t>(rank)];
    if (request.key == 100) throw EngineError("no such page");
    if (request.key == 101) return reply.refuse("not today");
    if (request.key == 102) return;
    if (request.key == 103) return reply.give({});
    std::unique_lock lock(served.mutex);
    if (served.version < request.version) {
      ++served.waiting;
      reply.about_to_wait();
      const bool arrived =
          served.grown.wait(lock, reply.stop(), [&] { return served.version >= request.version; });
      if (!arrived) throw EngineError("the version never came");
    }
    auto data = std::make_shared<std::vector<std::byte>>(contents(rank, request));
    reply.give(*data, data);
  }

  static std::vector<std::byte> contents(int rank, const PullRequest& request) {
    const auto all =
        pattern(kBytes, rank, static_cast<int>(request.key), static_cast<int>(request.version));
    std::vector<std::byte> part(request.bytes);
    if (!part.empty()) std::memcpy(part.data(), all.data() + request.begin, part.size());
    return part;
  }

  PullService& service(int rank) { return *served_[static_cast<std::size_t>(rank)]->service; }

  void set_version(int rank, std::uint64_t version) {
    Served& served = *served_[static_cast<std::size_t>(rank)];
    const std::lock_guard lock(served.mutex);
    served.version = version;
    served.grown.notify_all();
  }

  void expect_pull(int from, int of, std::uint64_t key, std::uint64_t version, std::uint64_t begin,
                   std::size_t bytes) {
    std::vector<std::byte> out(bytes);
    service(from).pull(of, key, version, begin, out);
    EXPECT_TRUE(same(out, contents(of, {from, key, version, begin, bytes})));
  }

  std::vector<std::unique_ptr<Served>> served_;
};

TEST_P(PullServiceTest, AnyoneReadsFromAnyone) {
  on_ranks(ranks(), [&](int r) {
    for (int of = 0; of < ranks(); ++of) {
      expect_pull(r, of, 0, 1, 0, kBytes);
      expect_pull(r, of, 2, 1, 4321, 1);
      expect_pull(r, of, 1, 1, kBytes, 0);
    }
  });
  // All have come back: what one rank pulled another has served, if not quite counted yet.
  for (int r = 0; r < ranks(); ++r) {
    EXPECT_EQ(service(r).stats().pulls, static_cast<std::uint64_t>(3 * (ranks() - 1)));
    EXPECT_EQ(service(r).stats().bytes_pulled, (kBytes + 1) * static_cast<unsigned>(ranks() - 1));
    while (service(r).stats().served < service(r).stats().pulls) std::this_thread::yield();
    EXPECT_EQ(service(r).stats().bytes_served, service(r).stats().bytes_pulled);
    EXPECT_EQ(service(r).stats().refused, 0u);
  }
}

TEST_P(PullServiceTest, ManyThreadsPullWhileCollectivesRun) {
  const Groups groups = make_groups("collectives");
  on_ranks(ranks(), [&](int r) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 25; ++i) {
          const int of = (r + t + i) % ranks();
          expect_pull(r, of, static_cast<std::uint64_t>(t) % kKeys, 1,
                      static_cast<std::uint64_t>(i * 100), static_cast<std::size_t>(1 + 9'000 * t));
        }
      });
    }
    for (int i = 0; i < 50; ++i) groups[static_cast<std::size_t>(r)]->barrier();
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_P(PullServiceTest, ABatchAsksForAllBeforeItWaits) {
  // Rank 0's answer needs version 2, which comes only once every other rank has been asked.
  const int last = ranks() - 1;
  std::vector<std::vector<std::byte>> out(static_cast<std::size_t>(ranks()),
                                          std::vector<std::byte>(1000));
  std::vector<Pull> pulls;
  for (int of = 0; of < ranks(); ++of) {
    pulls.push_back({of, 1, of == last ? 1u : 2u, 10, out[static_cast<std::size_t>(of)]});
  }
  std::thread helper([&] {
    for (int of = 0; of < last; ++of) {
      while (served_[static_cast<std::size_t>(of)]->waiting == 0) std::this_thread::yield();
    }
    for (int of = 0; of < last; ++of) set_version(of, 2);
  });
  service(last).pull(pulls);
  helper.join();
  for (int of = 0; of < ranks(); ++of) {
    EXPECT_TRUE(same(out[static_cast<std::size_t>(of)],
                     contents(of, {last, 1, of == last ? 1u : 2u, 10, 1000})));
  }
  service(last).pull(std::span<const Pull>());
}

TEST_P(PullServiceTest, HandlersThatWaitDoNotKeepOthersFromBeingAnswered) {
  if (ranks() == 1) return;
  constexpr int kWaiting = 8;  // more than there are threads
  std::vector<std::thread> threads;
  for (int i = 0; i < kWaiting; ++i) {
    threads.emplace_back([&] { expect_pull(0, 1, 0, 5, 0, 100); });
  }
  while (served_[1]->waiting < kWaiting) std::this_thread::yield();
  expect_pull(0, 1, 0, 1, 0, kBytes);
  set_version(1, 5);
  for (std::thread& thread : threads) thread.join();
  expect_pull(0, 1, 0, 5, 0, kBytes);
}

TEST_P(PullServiceTest, WhatAHandlerSaysIsThrownAtTheAsker) {
  const int of = ranks() - 1;
  std::vector<std::byte> out(64);
  const auto refusal = [&](std::uint64_t key) -> std::string {
    try {
      service(0).pull(of, key, 1, 0, out);
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.rank(), of);
      return error.what();
    }
    return "nothing";
  };
  const std::string rank = "rank " + std::to_string(of);
  EXPECT_THAT(refusal(100), AllOf(HasSubstr("no such page"), HasSubstr(rank)));
  EXPECT_THAT(refusal(101), AllOf(HasSubstr("not today"), HasSubstr(rank)));
  EXPECT_THAT(refusal(102), HasSubstr("no answer"));
  EXPECT_THAT(refusal(103), HasSubstr("64 bytes were asked for, the handler gave 0"));
  EXPECT_THROW(service(0).pull(of, 101, 1, 0, {}), RemoteError);

  // In a batch the others arrive all the same.
  std::vector<std::byte> first(100);
  std::vector<std::byte> last(100);
  const Pull pulls[] = {
      {of, 0, 1, 0, first}, {of, 101, 1, 0, out}, {of, 100, 1, 0, out}, {of, 2, 1, 0, last}};
  EXPECT_THAT([&] { service(0).pull(pulls); },
              ::testing::ThrowsMessage<RemoteError>(HasSubstr("not today")));
  EXPECT_TRUE(same(first, contents(of, {0, 0, 1, 0, 100})));
  EXPECT_TRUE(same(last, contents(of, {0, 2, 1, 0, 100})));
  expect_pull(0, of, 0, 1, 0, 100);
}

TEST_P(PullServiceTest, AbortEndsPullsAndTheService) {
  if (ranks() == 1) return;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      std::vector<std::byte> out(10);
      try {
        service(0).pull(1, 0, 9, 0, out);
        ADD_FAILURE() << "a version that never came was pulled";
      } catch (const GroupAborted& error) {
        EXPECT_EQ(error.reason(), "rank 1 is gone");
      }
    });
  }
  while (served_[1]->waiting < 3) std::this_thread::yield();
  service(0).abort("rank 1 is gone");
  for (std::thread& thread : threads) thread.join();
  std::vector<std::byte> out(10);
  EXPECT_THROW(service(0).pull(1, 0, 1, 0, out), GroupAborted);
}

TEST_P(PullServiceTest, EndsWhileHandlersWait) {
  if (ranks() == 1) return;
  std::thread asker([&] {
    std::vector<std::byte> out(10);
    EXPECT_THROW(service(0).pull(1, 0, 9, 0, out), EngineError);
  });
  while (served_[1]->waiting == 0) std::this_thread::yield();
  served_[1]->service.reset();
  asker.join();
}

TEST_P(PullServiceTest, RefusesARankThatIsNotThere) {
  std::vector<std::byte> out(10);
  EXPECT_THROW(service(0).pull(ranks(), 0, 1, 0, out), UserError);
  EXPECT_THROW(service(0).pull(-1, 0, 1, 0, out), UserError);
}

INSTANTIATE_TEST_SUITE_P(Worlds, PullServiceTest, ::testing::ValuesIn(world_cases()),
                         world_case_name);

}  // namespace
}  // namespace pagoda::comm

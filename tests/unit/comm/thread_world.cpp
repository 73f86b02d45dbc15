// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/thread_world.h"

#include <gmock/gmock.h>

#include "unit/comm/world_case.h"

namespace pagoda::comm {
namespace {

TEST(ThreadWorld, ASendersLinkIsTheLimit) {
  // 2 MB to each of two ranks leave rank 0 one after another, at 100 MB/s.
  const LinkSpeed links[] = {{1e8, 1'000'000}, {}, {}};
  const auto worlds = make_thread_worlds(3, links);
  Stopwatch watch;
  on_ranks(3, [&](int r) {
    const auto group = worlds[static_cast<std::size_t>(r)]->make_group("slow");
    std::vector<std::byte> data(2'000'000);
    group->broadcast(data, 0);
    group->barrier();
  });
  EXPECT_GE(watch.seconds(), 0.041);
}

TEST(ThreadWorld, RanksThatMakeGroupsInDifferentOrdersAreTold) {
  const auto worlds = make_thread_worlds(2);
  const auto first = worlds[0]->make_group("a");
  EXPECT_THROW(worlds[1]->make_group("b"), EngineError);
}

TEST(ThreadWorld, AMessageThatIsTooLongFailsOnBothSides) {
  const auto worlds = make_thread_worlds(2);
  const auto zero = worlds[0]->make_group("g");
  const auto one = worlds[1]->make_group("g");
  std::vector<std::byte> long_one(10);
  std::vector<std::byte> short_one(9);
  std::thread sender([&] { EXPECT_THROW(zero->send(1, 1, long_one), EngineError); });
  EXPECT_THROW(one->recv(0, 1, short_one), EngineError);
  sender.join();
}

TEST(ThreadWorld, ASecondThreadInACollectiveIsTold) {
  const auto worlds = make_thread_worlds(2);
  const auto zero = worlds[0]->make_group("g");
  const auto one = worlds[1]->make_group("g");
  std::atomic<int> told = 0;
  const auto barrier = [&] {
    try {
      zero->barrier();
    } catch (const GroupAborted&) {
    } catch (const EngineError&) {
      ++told;
      zero->abort("enough");
    }
  };
  std::thread first(barrier);
  std::thread second(barrier);
  first.join();
  second.join();
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace pagoda::comm

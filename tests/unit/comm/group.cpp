// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/group.h"

#include <atomic>

#include <gmock/gmock.h>

#include "unit/comm/world_case.h"

namespace pagoda::comm {
namespace {

using ::testing::HasSubstr;

class GroupTest : public OnWorlds {
 protected:
  void SetUp() override {
    OnWorlds::SetUp();
    groups_ = make_groups("test");
  }

  /// Rank r's part in round i: zero for one rank in each round, odd sizes, one of them large.
  std::size_t part_bytes(int rank, int round) const {
    if (round == 0) return 64;
    if ((rank + round) % ranks() == 0) return 0;
    return static_cast<std::size_t>(1 + rank * 1000 + (round == 3 ? 3'000'001 : round * 17));
  }

  Groups groups_;
};

TEST_P(GroupTest, KnowsItsPlace) {
  for (int r = 0; r < ranks(); ++r) {
    EXPECT_EQ(groups_[static_cast<std::size_t>(r)]->rank(), r);
    EXPECT_EQ(groups_[static_cast<std::size_t>(r)]->size(), ranks());
    EXPECT_EQ(groups_[static_cast<std::size_t>(r)]->name(), "test");
    EXPECT_EQ(world(r).rank(), r);
    EXPECT_EQ(world(r).size(), ranks());
  }
}

TEST_P(GroupTest, AllGatherOfUnevenParts) {
  on_groups(groups_, [&](Group& group) {
    const auto me = static_cast<std::size_t>(group.rank());
    for (int round = 0; round < 4; ++round) {
      std::vector<std::vector<std::byte>> parts;
      std::vector<std::span<std::byte>> spans;
      for (int r = 0; r < ranks(); ++r) parts.emplace_back(part_bytes(r, round));
      for (auto& part : parts) spans.emplace_back(part);
      const auto mine = pattern(parts[me].size(), group.rank(), 0, round);
      if (round % 2 == 0) {  // in place
        parts[me] = mine;
        spans[me] = parts[me];
        group.all_gather(parts[me], spans);
      } else {
        group.all_gather(mine, spans);
      }
      for (int r = 0; r < ranks(); ++r) {
        const auto& part = parts[static_cast<std::size_t>(r)];
        EXPECT_TRUE(same(part, pattern(part.size(), r, 0, round)))
            << "part " << r << " round " << round;
      }
    }
  });
}

TEST_P(GroupTest, AllToAllOfUnevenParts) {
  on_groups(groups_, [&](Group& group) {
    const int me = group.rank();
    for (int round = 0; round < 4; ++round) {
      const auto bytes = [&](int from, int to) { return part_bytes((from + 2 * to) % 5, round); };
      std::vector<std::vector<std::byte>> to;
      std::vector<std::vector<std::byte>> from;
      for (int r = 0; r < ranks(); ++r) {
        to.push_back(pattern(bytes(me, r), me, r, round));
        from.emplace_back(bytes(r, me));
      }
      const std::vector<std::span<const std::byte>> to_spans(to.begin(), to.end());
      const std::vector<std::span<std::byte>> from_spans(from.begin(), from.end());
      group.all_to_all(to_spans, from_spans);
      for (int r = 0; r < ranks(); ++r) {
        EXPECT_TRUE(same(from[static_cast<std::size_t>(r)], pattern(bytes(r, me), r, me, round)));
      }
    }
  });
}

TEST_P(GroupTest, BroadcastFromEachRoot) {
  on_groups(groups_, [&](Group& group) {
    for (int root = 0; root < ranks(); ++root) {
      auto data = pattern(1000, group.rank());
      group.broadcast(data, root);
      EXPECT_TRUE(same(data, pattern(1000, root)));
      group.broadcast({}, root);
    }
  });
}

TEST_P(GroupTest, ABarrierWaitsForEveryone) {
  std::atomic<int> arrived = 0;
  on_groups(groups_, [&](Group& group) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      group.barrier();
      EXPECT_GE(arrived, round * ranks());
      group.barrier();
    }
  });
}

TEST_P(GroupTest, ReductionsAreOverAllRanks) {
  on_groups(groups_, [&](Group& group) {
    const auto me = static_cast<std::uint64_t>(group.rank());
    std::vector<std::uint64_t> most{me, 100 - me, ~std::uint64_t{0} - me};
    group.all_reduce_max(most);
    EXPECT_EQ(most, (std::vector<std::uint64_t>{static_cast<std::uint64_t>(ranks() - 1), 100,
                                                ~std::uint64_t{0}}));
    std::vector<std::uint64_t> bits{std::uint64_t{1} << (60 + me)};
    group.all_reduce_or(bits);
    EXPECT_EQ(bits[0], ((std::uint64_t{1} << ranks()) - 1) << 60);
    group.all_reduce_or({});
  });
}

TEST_P(GroupTest, PointToPointFromManyThreadsBesideCollectives) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 10;
  on_groups(groups_, [&](Group& group) {
    const int right = (group.rank() + 1) % ranks();
    const int left = (group.rank() + ranks() - 1) % ranks();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads && ranks() > 1; ++t) {
      threads.emplace_back([&, t] {
        for (int round = 0; round < kRounds; ++round) {
          const auto tag = static_cast<Tag>(t);
          const std::size_t bytes = static_cast<std::size_t>(1 + t * 100'000 + round);
          const auto out = pattern(bytes, group.rank(), t, round);
          std::vector<std::byte> in(bytes);
          const Transfer both[] = {send_to(right, tag, out), receive_from(left, tag, in)};
          group.exchange(both);
          EXPECT_TRUE(same(in, pattern(bytes, left, t, round)));
        }
      });
    }
    for (int round = 0; round < kRounds; ++round) group.barrier();
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_P(GroupTest, MessagesOfOneTagKeepTheirOrder) {
  if (ranks() == 1) return;
  on_groups(groups_, [&](Group& group) {
    for (unsigned char i = 0; i < 100; ++i) {
      std::byte value{i};
      if (group.rank() == 0) group.send(1, 7, {&value, 1});
      if (group.rank() != 1) continue;
      value = std::byte{};
      group.recv(0, 7, {&value, 1});
      EXPECT_EQ(value, std::byte{i});
    }
  });
}

TEST_P(GroupTest, ReceivesFromAnyoneAndSaysFromWhom) {
  constexpr int kEach = 20;
  on_groups(groups_, [&](Group& group) {
    if (group.rank() != 0) {
      for (int i = 0; i < kEach; ++i) group.send(0, 3, pattern(100, group.rank(), 0, i));
      return;
    }
    std::vector<int> seen(static_cast<std::size_t>(ranks()), 0);
    for (int i = 0; i < kEach * (ranks() - 1); ++i) {
      std::vector<std::byte> data(100);
      const int from = group.recv_any(3, data);
      EXPECT_TRUE(same(data, pattern(100, from, 0, seen[static_cast<std::size_t>(from)]++)));
    }
  });
}

TEST_P(GroupTest, AMessageMayBeShorterThanTheSpan) {
  if (ranks() == 1) return;
  on_groups(groups_, [&](Group& group) {
    std::vector<std::byte> data = pattern(3, 0);
    if (group.rank() == 0) group.send(1, 1, data);
    if (group.rank() != 1) return;
    data = std::vector<std::byte>(5, std::byte{9});
    group.recv(0, 1, data);
    auto expected = pattern(3, 0);
    expected.resize(5, std::byte{9});
    EXPECT_EQ(data, expected);
  });
}

TEST_P(GroupTest, CountsWhatGoesToOthers) {
  on_groups(groups_, [&](Group& group) {
    const auto others = static_cast<std::uint64_t>(ranks() - 1);
    std::vector<std::byte> mine(100);
    std::vector<std::vector<std::byte>> parts(static_cast<std::size_t>(ranks()), mine);
    const std::vector<std::span<std::byte>> spans(parts.begin(), parts.end());
    const std::vector<std::span<const std::byte>> to(parts.begin(), parts.end());
    group.all_gather(mine, spans);
    group.all_gather(mine, spans);
    group.all_to_all(to, spans);
    group.broadcast(mine, 0);
    std::uint64_t word = 0;
    group.all_reduce_or({&word, 1});
    if (ranks() > 1 && group.rank() == 0) group.send(1, 1, mine);
    if (group.rank() == 1) group.recv(0, 1, mine);
    const GroupStats stats = group.stats();
    EXPECT_EQ(stats.gather.calls, 2u);
    EXPECT_EQ(stats.gather.sent, 200 * others);
    EXPECT_EQ(stats.gather.received, 200 * others);
    EXPECT_EQ(stats.all_to_all.sent, 100 * others);
    EXPECT_EQ(stats.all_to_all.received, 100 * others);
    EXPECT_EQ(stats.broadcast.sent, group.rank() == 0 ? 100 * others : 0);
    EXPECT_EQ(stats.broadcast.received, group.rank() == 0 ? 0 : 100u);
    EXPECT_EQ(stats.control.sent, 8 * others);
    EXPECT_EQ(stats.point_to_point.sent, ranks() > 1 && group.rank() == 0 ? 100u : 0u);
    EXPECT_EQ(stats.point_to_point.received, group.rank() == 1 ? 100u : 0u);
    EXPECT_EQ(stats.total().calls, 5u + stats.point_to_point.calls);
  });
}

TEST_P(GroupTest, RefusesWhatCannotBe) {
  Group& group = *groups_[0];
  std::vector<std::byte> data(4);
  std::vector<std::span<std::byte>> parts(static_cast<std::size_t>(ranks()) + 1, data);
  EXPECT_THROW(group.all_gather(data, parts), UserError);
  parts.pop_back();
  parts[0] = parts[0].first(3);
  EXPECT_THROW(group.all_gather(data, parts), UserError);
  EXPECT_THROW(group.broadcast(data, ranks()), UserError);
  EXPECT_THROW(group.send(0, 1, data), UserError);
  EXPECT_THROW(group.send(ranks(), 1, data), UserError);
  EXPECT_THROW(group.recv_any(kTags, data), UserError);
  EXPECT_THROW(group.recv_any(1, {}), UserError);
}

/// What a call says after abort("the reason").
template <class Fn>
void expect_aborted(Fn&& fn, const char* what) {
  try {
    fn();
    ADD_FAILURE() << what << " came back";
  } catch (const GroupAborted& error) {
    EXPECT_EQ(error.reason(), "the reason") << what;
    EXPECT_THAT(error.what(), HasSubstr("the reason"));
  }
}

TEST_P(GroupTest, AbortEndsWhatIsBlockedAndWhatComesLater) {
  Group& group = *groups_[0];
  std::vector<std::byte> data(1'000'000);
  std::atomic<int> started = 0;
  std::vector<std::thread> threads;
  const auto blocked = [&](const char* what, std::function<void()> call) {
    threads.emplace_back([&, what, call = std::move(call)] {
      ++started;
      expect_aborted(call, what);
    });
  };
  blocked("recv_any", [&] {
    std::vector<std::byte> in(8);
    group.recv_any(1, in);
  });
  if (ranks() > 1) {
    blocked("recv", [&] {
      std::vector<std::byte> in(8);
      group.recv(1, 2, in);
    });
    blocked("send", [&] { group.send(1, 3, data); });
    blocked("barrier", [&] { group.barrier(); });
  }
  while (started < static_cast<int>(threads.size())) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // most are blocked by now
  group.abort("the reason");
  group.abort("another");
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(group.aborted());
  expect_aborted([&] { group.barrier(); }, "a later barrier");
  expect_aborted([&] { group.broadcast(data, 0); }, "a later broadcast");
  expect_aborted([&] { group.recv_any(1, data); }, "a later recv_any");
  if (ranks() > 1) expect_aborted([&] { group.send(1, 1, data); }, "a later send");
}

TEST_P(GroupTest, APeerThatLeftIsNamed) {
  if (ranks() == 1) return;
  const int last = ranks() - 1;
  on_ranks(ranks(), [&](int r) {
    auto& group = groups_[static_cast<std::size_t>(r)];
    if (r == last) {
      group->barrier();
      group.reset();
      return;
    }
    group->barrier();
    try {
      group->barrier();
      ADD_FAILURE() << "a barrier without rank " << last;
    } catch (const PeerLost& error) {
      EXPECT_EQ(error.rank(), last);
      EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(last)));
    }
    EXPECT_TRUE(group->aborted());
    EXPECT_THROW(group->barrier(), GroupAborted);
  });
}

TEST_P(GroupTest, GroupsDoNotMeet) {
  const Groups others = make_groups("other");
  on_ranks(ranks(), [&](int r) {
    const auto me = static_cast<std::size_t>(r);
    std::uint64_t one = 1;
    std::uint64_t two = 2;
    std::thread thread([&] {
      for (int i = 0; i < 20; ++i) groups_[me]->all_reduce_or({&one, 1});
    });
    for (int i = 0; i < 20; ++i) others[me]->all_reduce_or({&two, 1});
    thread.join();
    EXPECT_EQ(one, 1u);
    EXPECT_EQ(two, 2u);
  });
  groups_[0]->abort("the reason");
  EXPECT_FALSE(others[0]->aborted());
  on_groups(others, [](Group& group) { group.barrier(); });
}

TEST_P(GroupTest, TheBoardIsSharedAndNeverWaits) {
  EXPECT_EQ(world(0).get("nothing"), std::nullopt);
  on_ranks(ranks(), [&](int r) {
    for (int i = 0; i < 10; ++i) world(r).put("key/" + std::to_string(r), std::to_string(i));
    world(r).put("empty", "");
  });
  for (int r = 0; r < ranks(); ++r) {
    EXPECT_EQ(world(0).get("key/" + std::to_string(r)), "9");
    EXPECT_EQ(world(r).get("empty"), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, GroupTest, ::testing::ValuesIn(world_cases()), world_case_name);

}  // namespace
}  // namespace pagoda::comm

// SPDX-License-Identifier: Apache-2.0
// A small pager that does what the schedule says. On demand alone it fetches as seldom as any order
// of evictions could; with fetching ahead, room is never made by evicting what is used sooner, and
// a fetch that is fast enough is never waited for.
#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/prefetch/schedule.h"

namespace pagoda::prefetch {
namespace {

/// Resident or absent, of given sizes. The one in use is pinned.
class Cache : public pager::Occupancy {
 public:
  Cache(std::vector<Bytes> sizes, Bytes capacity)
      : sizes_(std::move(sizes)), here_(sizes_.size()), free_(capacity) {}

  bool has(PageId page) const { return here_[page]; }
  void fetch(PageId page) {
    ASSERT_LE(sizes_[page], free_);
    free_ -= sizes_[page];
    here_[page] = true;
    resident_.push_back(page);
  }
  void evict(PageId page) {
    free_ += sizes_[page];
    here_[page] = false;
    std::erase(resident_, page);
  }
  void use(PageId page) { in_use_ = page; }
  std::uint32_t set() const {
    std::uint32_t bits = 0;
    for (const PageId page : resident_) bits |= 1U << page;
    return bits;
  }

  pager::Outlook page(PageId page) const override {
    using Where = pager::Outlook::Where;
    return {sizes_[page], here_[page] ? Where::Resident : Where::Absent, page == in_use_, false};
  }
  std::span<const PageId> resident() const override { return resident_; }
  Bytes free() const override { return free_; }
  Bytes evictable() const override {
    Bytes sum = 0;
    for (const PageId page : resident_) sum += page == in_use_ ? 0 : sizes_[page];
    return sum;
  }
  std::size_t awaiting_update() const override { return 0; }  // a schedule does not ask
  std::uint64_t changes() const override { return 0; }

 private:
  std::vector<Bytes> sizes_;
  std::vector<bool> here_;
  std::vector<PageId> resident_;
  Bytes free_;
  PageId in_use_ = ~PageId{0};
};

std::vector<PageId> random_pages(std::mt19937& random, std::size_t length, PageId pages) {
  std::vector<PageId> period;
  while (period.size() < length) {
    const PageId page = static_cast<PageId>(random() % pages);
    const bool last = period.size() + 1 == length;
    if (!period.empty() && (period.back() == page || (last && period.front() == page))) continue;
    period.push_back(page);
  }
  return period;
}

/// The least number of fetches with which the trace can be served from this set, by trying all.
int fewest_fetches(const std::vector<PageId>& trace, std::uint32_t set, int capacity) {
  std::map<std::uint32_t, int> costs{{set, 0}};
  for (const PageId page : trace) {
    const std::uint32_t bit = 1U << page;
    std::map<std::uint32_t, int> next;
    const auto reach = [&](std::uint32_t to, int cost) {
      const auto [it, added] = next.emplace(to, cost);
      if (!added) it->second = std::min(it->second, cost);
    };
    for (const auto& [from, cost] : costs) {
      if ((from & bit) != 0) {
        reach(from, cost);
      } else if (std::popcount(from) < capacity) {
        reach(from | bit, cost + 1);
      } else {
        for (std::uint32_t rest = from; rest != 0; rest &= rest - 1) {
          reach((from & ~(rest & (~rest + 1))) | bit, cost + 1);
        }
      }
    }
    costs = std::move(next);
  }
  int best = costs.begin()->second;
  for (const auto& [to, cost] : costs) best = std::min(best, cost);
  return best;
}

TEST(PrefetchResidency, EvictionsAreTheBestPossible) {
  std::mt19937 random(2);
  Predictor::Options options;
  options.horizon = 256;
  for (int round = 0; round < 200; ++round) {
    const auto pages = static_cast<PageId>(4 + random() % 5);
    const int capacity = 2 + static_cast<int>(random() % (pages - 2));
    const auto period = random_pages(random, 6 + random() % 20, pages);
    Predictor predictor(options);
    Cache cache(std::vector<Bytes>(pages, 1), static_cast<Bytes>(capacity));
    const FetchRate rate;
    const Schedule schedule(predictor, cache, rate);
    Nanos now = 0;
    int fetches = 0;
    const auto touch = [&](PageId page) {
      predictor.touch({page, 0}, now += 1000);
      cache.use(page);
      if (cache.has(page)) return;
      while (cache.free() == 0) {
        const auto victim = schedule.choose_victim();
        ASSERT_TRUE(victim);
        cache.evict(*victim);
      }
      cache.fetch(page);
      ++fetches;
    };
    for (int pass = 0; pass < 30; ++pass) std::ranges::for_each(period, touch);
    std::vector<PageId> trace = period;
    trace.insert(trace.end(), period.begin(), period.end());
    const std::uint32_t start = cache.set();
    const auto misses = predictor.stats().misses;
    fetches = 0;
    std::ranges::for_each(trace, touch);
    ASSERT_EQ(predictor.stats().misses, misses) << "the prediction is perfect";
    ASSERT_EQ(fetches, fewest_fetches(trace, start, capacity))
        << "round " << round << ", " << pages << " pages, room for " << capacity;
  }
}

TEST(PrefetchResidency, RoomIsNeverMadeByWhatIsNeededSooner) {
  std::mt19937 random(3);
  Predictor::Options options;
  options.horizon = 256;
  std::uint64_t ahead = 0;
  std::uint64_t evicted = 0;
  for (int round = 0; round < 200; ++round) {
    const auto pages = static_cast<PageId>(5 + random() % 40);
    std::vector<Bytes> sizes;
    Bytes total = 0;
    for (PageId page = 0; page < pages; ++page) {
      sizes.push_back(1 + random() % 100);
      total += sizes.back();
    }
    Cache cache(sizes, std::max<Bytes>(200, total * (20 + random() % 70) / 100));
    Predictor predictor(options);
    // From far too slow to far too fast; a touch takes a microsecond.
    const FetchRate rate(
        FetchRate::Options{.latency = 1e-9 * static_cast<double>(random() % 3000),
                           .bandwidth = 1e6 * std::pow(10.0, static_cast<double>(random() % 5)),
                           .memory = 8});
    const Schedule schedule(predictor, cache, rate);
    const auto period = random_pages(random, 10 + random() % 90, pages);
    Nanos now = 0;
    for (int pass = 0; pass < 10; ++pass) {
      for (const PageId page : period) {
        predictor.touch({page, 0}, now += 1000);
        cache.use(page);
        if (!cache.has(page)) {
          while (cache.free() < sizes[page]) cache.evict(schedule.choose_victim().value());
          cache.fetch(page);
        }
        while (const auto next = schedule.next_fetch()) {
          ASSERT_FALSE(cache.has(*next));
          const auto use = predictor.next_use(*next);
          ASSERT_TRUE(use);
          while (cache.free() < sizes[*next]) {
            const auto victim = schedule.choose_victim();
            ASSERT_TRUE(victim) << "the room it counted on is there";
            ASSERT_NE(*victim, page) << "in use";
            ASSERT_GT(predictor.next_use(*victim).value_or(options.horizon + 1), *use)
                << "round " << round << ": evicts page " << *victim << " for page " << *next;
            cache.evict(*victim);
            ++evicted;
          }
          cache.fetch(*next);
          ++ahead;
        }
      }
    }
  }
  EXPECT_GT(ahead, 10'000U);
  EXPECT_GT(evicted, 10'000U);
}

/// One link with latency and bandwidth, on a simulated clock: the seconds a program of operators
/// waits for pages in its last passes, and how much of the time operators take that is.
/// With `pauses`, the schedule is not asked while it says that there is nothing to fetch.
double waiting_share(double fetch_over_operator, PageId pages = 60, bool pauses = false) {
  constexpr Nanos kOperator = 1'000'000;
  const auto fetch_time = static_cast<Nanos>(fetch_over_operator * kOperator);
  const Bytes bytes = 1'000'000;
  Cache cache(std::vector<Bytes>(pages, bytes), pages / 3 * bytes);
  Predictor predictor;
  FetchRate rate;
  const Schedule schedule(predictor, cache, rate);
  Nanos now = 0;
  Nanos link_free = 0;
  std::vector<Nanos> arrives(pages, 0);
  Schedule::Pause pause;
  std::uint64_t surprises = 0;
  const auto fetch = [&](PageId page) {
    while (cache.free() < bytes) cache.evict(schedule.choose_victim().value());
    cache.fetch(page);
    pause = {};
    arrives[page] = link_free = std::max(now, link_free) + fetch_time;
    rate.add(bytes, static_cast<double>(fetch_time) * 1e-9);
  };
  Nanos waited = 0;
  Nanos worked = 0;
  const auto touch = [&](PageId page, std::uint8_t mode) {
    predictor.touch({page, mode}, now);
    cache.use(page);
    if (!cache.has(page)) fetch(page);
    // The pager starts what is due while it waits, but keeps few requests with the link.
    while (link_free < now + 3 * fetch_time) {
      const bool quiet = pauses && surprises == predictor.surprises() &&
                         predictor.position() < pause.touches && now < pause.time;
      if (quiet) break;
      const auto next = schedule.next_fetch(&pause);
      if (!next) {
        pause = {predictor.position() + pause.touches, now + pause.time};
        surprises = predictor.surprises();
        break;
      }
      fetch(*next);
    }
    const Nanos wait = std::max<Nanos>(0, arrives[page] - now);
    predictor.stalled(wait);
    now += wait + kOperator;
    waited += wait;
    worked += kOperator;
  };
  for (int pass = 0; pass < 12; ++pass) {
    if (pass == 4) waited = worked = 0;
    for (PageId page = 0; page < pages; ++page) touch(page, 1);
    for (PageId page = pages; page-- > 0;) touch(page, 3);
  }
  return static_cast<double>(waited) / static_cast<double>(worked);
}

TEST(PrefetchResidency, NothingIsLateForPauses) {
  for (const PageId pages : {12U, 60U, 240U}) {
    EXPECT_EQ(waiting_share(0.1, pages, true), 0.0) << pages;
    EXPECT_EQ(waiting_share(0.5, pages, true), 0.0) << pages;
    EXPECT_EQ(waiting_share(0.9, pages, true), 0.0) << pages;
    EXPECT_LE(waiting_share(3.0, pages, true), waiting_share(3.0, pages) + 0.01) << pages;
  }
}

TEST(PrefetchResidency, AFastLinkIsNeverWaitedFor) {
  EXPECT_EQ(waiting_share(0.1), 0.0);
  EXPECT_EQ(waiting_share(0.5), 0.0);
  EXPECT_EQ(waiting_share(0.9), 0.0);
  // 40 of 60 pages cross in each of forward and backward: a link three times too slow is the limit
  // at twice the time of the operators, so the wait is about once that time.
  EXPECT_NEAR(waiting_share(3.0), 1.0, 0.1);
}

}  // namespace
}  // namespace pagoda::prefetch

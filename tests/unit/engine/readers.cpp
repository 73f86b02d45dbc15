// SPDX-License-Identifier: Apache-2.0
// Threads that only read parameters while ranks train: they change nothing, and end nothing. A rank
// may be a step behind another one, which does not have the version any more that a reader asks
// for.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/engine/rehearsal.h"
#include "unit/engine/small_rank.h"

namespace pagoda::engine {
namespace {

class Readers : public testing::TestWithParam<std::tuple<int, unsigned>> {
 protected:
  /// What ranks have trained, with readers on those that are named.
  std::vector<SmallRank::Bits> trained(const std::vector<int>& readers) const {
    const auto [ranks, zero] = GetParam();
    std::vector<std::vector<SmallRank::Bits>> out(static_cast<std::size_t>(ranks));
    const auto ended = run_ranks(ranks, [&](auto world) {
      SmallRank::Options mine;
      mine.config = tiny();
      mine.config.zero = zero;
      mine.config.timeout = 30;
      SmallRank rank(mine, world);
      rank.attach();
      const bool reads = std::count(readers.begin(), readers.end(), rank.rank()) > 0;
      std::atomic<bool> stop{false};
      std::string failed;
      std::jthread reader([&, reads] {
        failed = thrown_by([&] {
          while (reads && !stop) {
            for (std::size_t page = 0; page < 4; ++page) {
              const pager::Access access{&rank.page(page), false};
              rank.runtime().pager().touch({&access, 1}, 0, nullptr).release();
            }
          }
        });
      });
      for (int step = 0; step < 30; ++step) {
        rank.backward(step);
        rank.step();
      }
      stop = true;
      reader.join();
      EXPECT_EQ(failed, "");
      out[static_cast<std::size_t>(rank.rank())] = rank.values();
      rank.join();
    });
    EXPECT_THAT(ended, testing::Each(std::string()));
    EXPECT_THAT(out, testing::Each(out[0]));
    return out[0];
  }
};

TEST_P(Readers, ChangeNothing) {
  const auto alone = trained({});
  EXPECT_EQ(trained({0}), alone);
  EXPECT_EQ(trained({1}), alone);
  EXPECT_EQ(trained({0, 1}), alone);
}

INSTANTIATE_TEST_SUITE_P(, Readers,
                         testing::Combine(testing::Values(2, 3), testing::Values(0U, 1U, 3U)),
                         kRanksAndStage);

}  // namespace
}  // namespace pagoda::engine

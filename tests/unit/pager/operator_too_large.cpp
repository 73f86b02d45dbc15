// SPDX-License-Identifier: Apache-2.0
// What is said of an operator whose pages do not fit on the device together.
#include <atomic>
#include <barrier>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/pager/pager_on.h"

namespace pagoda::pager {
namespace {

using testing::HasSubstr;

class TooLargeOn : public PagerOn {};

INSTANTIATE_TEST_SUITE_P(, TooLargeOn, kDevicesAndHomes, kDeviceAndHome);

TEST_P(TooLargeOn, NamesThePagesAndTheirSizes) {
  Page& a = page(20'000, 1);
  Page& b = page(20'000, 2);
  const Access both[] = {{&a, false}, {&b, false}};
  try {
    Pin pin = pager_->touch(both, 0, nullptr);
    FAIL() << "it fits?";
  } catch (const OperatorTooLarge& error) {
    EXPECT_THAT(error.message(), HasSubstr("page 1"));
    EXPECT_THAT(error.message(), HasSubstr("page 2"));
    EXPECT_THAT(error.message(), HasSubstr("19.53 KiB"));
    EXPECT_THAT(error.message(), HasSubstr("32 KiB"));
  }
  EXPECT_EQ(seen(a), std::vector<std::byte>(20'000, std::byte{1})) << "nothing stays pinned";
  EXPECT_EQ(seen(b), std::vector<std::byte>(20'000, std::byte{2}));
}

// Each of two threads is inside an operator that has a page and needs one more; there is room for
// two. One of them is told so, and the other one goes on.
TEST_P(TooLargeOn, IsSaidToOneOfTwoThreadsThatWouldWaitForEachOther) {
  Page* pages[] = {&page(16'000, 1), &page(16'000, 2), &page(16'000, 3), &page(16'000, 4)};
  std::barrier have{2};
  std::atomic<int> failed = 0;
  const auto run = [&](Page& outer, Page& inner) {
    const Access access{&outer, false};
    const Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    have.arrive_and_wait();
    try {
      EXPECT_EQ(seen(inner), std::vector<std::byte>(16'000, std::byte(inner.id + 1)));
    } catch (const OperatorTooLarge& error) {
      ++failed;
      EXPECT_THAT(error.message(), HasSubstr("32 KiB of it pinned"));
      EXPECT_THAT(error.message(), HasSubstr("raise device_budget to at least 48 KiB"));
    }
  };
  {
    std::jthread other([&] { run(*pages[2], *pages[3]); });
    run(*pages[0], *pages[1]);
  }
  EXPECT_EQ(failed, 1);
}

/// Touches 40 pages of different sizes at once. Empty, or what was said against it.
std::string touch_many(Bytes device_budget, Bytes staging, Bytes share, bool one_is_held) {
  Tiers::Options options;
  options.device = device::host::make_device({});
  options.device_budget = device_budget;
  options.gradient_share = share;
  options.gradient_staging = share == 0 ? staging : device_budget / share;
  options.host_budget = 64_MiB;
  Tiers tiers(options);
  Pager::Options pages;
  pages.fetch_threads = 1;
  pages.staging = 4_KiB;
  Pager pager(tiers, pages);
  std::vector<Access> accesses;
  for (std::uint64_t i = 1; i <= 40; ++i) {
    accesses.push_back({&pager.adopt(fmt::format("page {}", i), 30 * i, 1, Placement::Host, nullptr,
                                     device::Direction::HostToHost),
                        false});
  }
  Page& other =
      pager.adopt("other", 1000, 1, Placement::Host, nullptr, device::Direction::HostToHost);
  std::optional<Hold> hold;
  if (one_is_held) hold.emplace(pager.hold(other, nullptr));
  std::string said;
  try {
    Pin pin = pager.touch(accesses, 0, nullptr);
    pin.release();
  } catch (const OperatorTooLarge& error) {
    said = error.message();
  }
  return said;
}

TEST(TooLarge, NamesFivePagesAndTheSmallestBudgetThatWorks) {
  constexpr std::string_view kAdvice = "raise device_budget to at least ";
  for (const auto& [staging, share] : {std::pair{Bytes{4_KiB}, Bytes{0}}, {Bytes{0}, Bytes{8}}}) {
    for (const bool one_is_held : {false, true}) {
      const std::string said = touch_many(12_KiB, staging, share, one_is_held);
      SCOPED_TRACE(said);
      EXPECT_LT(said.size(), 400U);
      EXPECT_THAT(said, HasSubstr("in blocks of 512 B"));
      EXPECT_THAT(said, HasSubstr("page 40 (1.17 KiB), page 39 (1.14 KiB), page 38 (1.11 KiB), "
                                  "page 37 (1.08 KiB), page 36 (1.05 KiB) and 35 more"));
      const std::size_t at = said.find(kAdvice);
      ASSERT_NE(at, std::string::npos);
      const Bytes advised = parse_bytes(said.substr(at + kAdvice.size()));
      EXPECT_EQ(touch_many(advised, staging, share, one_is_held), "");
      EXPECT_NE(touch_many(advised - 512, staging, share, one_is_held), "");
    }
  }
}

}  // namespace
}  // namespace pagoda::pager

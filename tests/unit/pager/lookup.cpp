// SPDX-License-Identifier: Apache-2.0
// Rows that an operator looks up where they lie.
#include "pagoda/pager/lookup.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/pager/page_record.h"
#include "unit/pager/add_one.h"
#include "unit/pager/pager_on.h"

namespace pagoda::pager {
namespace {

using testing::HasSubstr;

TEST(Lookup, ElementsOfRowsAscendAndNeighboursAreOne) {
  PageRecord page(0, "page", 50, 2);
  Lookup lookup;
  lookup.page = &page;
  lookup.first = 5;
  lookup.width = 10;
  const std::vector<std::int64_t> rows = {3, -1, 0, 3, 1, 4, 1000};  // the last row is cut off
  EXPECT_THAT(elements_of(rows, lookup), testing::ElementsAre(Range{5, 25}, Range{35, 45}));
}

/// Says that it can wait for rows, and which it was asked for.
class Parts final : public PendingUpdates {
 public:
  explicit Parts(bool can) : can_(can) {}
  void wait_for_update(Page& /*page*/) override { ADD_FAILURE() << "all of it was asked for"; }
  bool can_wait_for_rows(const Page& /*page*/, std::uint64_t /*wanted*/) override { return can_; }
  const std::byte* wait_for_rows(Page& page, std::span<const Range> parts) override {
    EXPECT_EQ(record_of(page).lookups, 1U);
    asked.assign(parts.begin(), parts.end());
    return Pager::home(page).data();
  }
  Range kept(const Page& page, Range /*shard*/) override { return {0, page.elements}; }
  void overwritten(Page&, std::uint64_t, std::uint64_t, const std::byte*,
                   const std::byte*) override {}

  std::vector<Range> asked;

 private:
  const bool can_;
};

class LookupOn : public PagerOn {};

INSTANTIATE_TEST_SUITE_P(, LookupOn, kDevicesAndHomes, kDeviceAndHome);

TEST_P(LookupOn, FindsRowsWhereTheyLie) {
  Parts updates(true);
  pager_->set_pending_updates(&updates);
  Page& a = page(4'000, 7);
  Lookup lookup;
  lookup.page = &a;
  lookup.width = 100;
  lookup.count = 3;
  lookup.rows = [] { return std::vector<std::int64_t>{5, 2, 5}; };
  if (std::get<1>(GetParam()) == Placement::Nvme) {
    EXPECT_FALSE(pager_->look_up(lookup, nullptr));
    return;
  }
  Pin pin = pager_->look_up(lookup, nullptr);
  ASSERT_TRUE(pin);
  EXPECT_THAT(updates.asked, testing::IsEmpty()) << "nothing was pending";
  EXPECT_EQ(binding(a).data(), Pager::home(a).data());
  EXPECT_EQ(pager_->look(a).residency, Residency::Absent);
  pin.release();
  EXPECT_EQ(binding(a).data(), nullptr);
  EXPECT_THAT(binding(a).why(), HasSubstr("page 7"));

  Page* const pending[] = {&a};
  pager_->mark_pending(pending);
  pin = pager_->look_up(lookup, nullptr);
  ASSERT_TRUE(pin);
  EXPECT_THAT(updates.asked, testing::ElementsAre(Range{200, 300}, Range{500, 600}));
  pin.release();
  pager_->updated(a, 1);
  EXPECT_EQ(pager_->stats().lookups, 2U);
  EXPECT_EQ(pager_->stats().host_to_device, 2U * 3 * 100 * 2);

  const auto refused = [&](const Lookup& other) { return !pager_->look_up(other, nullptr); };
  Lookup most = lookup;
  most.count = 11;  // of twenty rows
  EXPECT_TRUE(refused(most));
  Page& small = page(1'000, 8);
  Lookup of_small = lookup;
  of_small.page = &small;
  EXPECT_TRUE(refused(of_small));
  (void)seen(a);
  EXPECT_TRUE(refused(lookup)) << "it is on the device";
  EXPECT_TRUE(pager_->evict(a));
  Parts whole_only(false);
  pager_->set_pending_updates(&whole_only);
  EXPECT_TRUE(refused(lookup)) << "its rows cannot go before the rest";
  const PageSnapshot left = pager_->look(a);
  EXPECT_EQ(left.pins + left.readers + left.lookups, 0U);
  pager_->set_pending_updates(nullptr);
}

TEST_P(LookupOn, IsWaitedForByOthers) {
  if (std::get<1>(GetParam()) == Placement::Nvme) GTEST_SKIP() << "lookups are of host memory";
  AddOne updates(*tiers_, *pager_);
  Page& a = page(4'000, 7);
  Lookup lookup;
  lookup.page = &a;
  lookup.width = 100;
  lookup.count = 1;
  Pin pin = pager_->look_up(lookup, nullptr);
  ASSERT_TRUE(pin);
  pager_->set_pending_updates(&updates);
  std::atomic<int> ended = 0;
  std::jthread reader([&] {
    EXPECT_EQ(seen(a)[0], std::byte{7});
    ++ended;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(ended, 0);
  EXPECT_EQ(binding(a).data(), Pager::home(a).data());
  pin.release();
  reader.join();
  EXPECT_TRUE(pager_->evict(a));

  pager_->set_pending_updates(nullptr);
  pin = pager_->look_up(lookup, nullptr);
  ASSERT_TRUE(pin);
  pager_->set_pending_updates(&updates);
  std::jthread stepper([&] {
    Page* const pending[] = {&a};
    pager_->mark_pending(pending);
    ++ended;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(ended, 1);
  pin.release();
  stepper.join();
  EXPECT_EQ(seen(a)[0], std::byte{8});
  pager_->set_pending_updates(nullptr);
}

TEST(Lookup, AHomeStaysUntilItsStreamHasReadIt) {
  constexpr Bytes kBytes = 64_KiB;
  Tiers::Options options;
  options.device = device::emulated::make_device();
  options.device_budget = 2 * kBytes;
  options.host_budget = 64_MiB;
  Tiers tiers(options);
  PlainBinding binding;
  Pager::Options pages;
  pages.least_lookup = 1;
  Pager pager(tiers, pages);
  const auto consumer = options.device->make_stream({.name = "consumer"});
  const std::vector<std::byte> contents(kBytes, std::byte{7});
  const std::vector<std::pair<const char*, std::function<void(Page&)>>> changes = {
      {"mark_pending",
       [&](Page& page) {
         Page* const pending[] = {&page};
         pager.mark_pending(pending);
         pager.updated(page, 1);
       }},
      {"cut",
       [&](Page& page) {
         pager.set_home_range(page, {0, 100}, Placement::Host);
       }},
      {"fix", [&](Page& page) { pager.fix(page); }},
      {"drop", [&](Page& page) { pager.drop(page); }}};
  for (const auto& [name, change] : changes) {
    Page& page = pager.adopt(name, kBytes / 2, 2, Placement::Host, contents.data(),
                             device::Direction::HostToHost);
    pager.set_binding(page, &binding);
    Lookup lookup;
    lookup.page = &page;
    lookup.width = 16;
    lookup.count = 1;
    Pin pin = pager.look_up(lookup, consumer.get());
    ASSERT_TRUE(pin) << name;
    std::atomic<bool> read = false;
    consumer->enqueue("lookup", [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      read = true;
    });
    pin.release();
    change(page);
    EXPECT_TRUE(read) << name;
  }
}

}  // namespace
}  // namespace pagoda::pager

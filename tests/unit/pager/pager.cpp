// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/pager.h"

#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/pager/page_record.h"
#include "unit/io/scratch_directory.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::pager {
namespace {

using testing::HasSubstr;

/// Makes updates at once: adds one to every byte of a page's home.
class AddOne final : public PendingUpdates {
 public:
  AddOne(Tiers& tiers, Pager& pager) : tiers_(tiers), pager_(pager) {}

  void wait_for_update(Page& page) override {
    const std::lock_guard lock(mutex_);
    const PageSnapshot now = pager_.look(page);
    if (now.version >= now.wanted) return;
    std::vector<std::byte> bytes(page.bytes());
    tiers_.read(Pager::home(page), 0, bytes);
    for (std::byte& value : bytes) value = std::byte(static_cast<unsigned char>(value) + 1);
    tiers_.write(Pager::home(page), 0, bytes);
    pager_.updated(page, now.wanted);
  }
  const std::byte* wait_for_rows(Page& page, std::span<const Range> /*parts*/) override {
    wait_for_update(page);
    return Pager::home(page).data();
  }
  Range kept(const Page& page, Range /*shard*/) override { return {0, page.elements}; }
  void overwritten(Page& page, std::uint64_t begin, std::uint64_t count, const std::byte* before,
                   const std::byte* after) override {
    const std::lock_guard lock(mutex_);
    for (std::uint64_t i = 0; i < count * page.element_size; ++i) {
      if (before[i] != after[i]) changed_[page.id] += 1;
    }
    (void)begin;
  }
  int changed(const Page& page) {
    const std::lock_guard lock(mutex_);
    return changed_[page.id];
  }

 private:
  Tiers& tiers_;
  Pager& pager_;
  std::mutex mutex_;
  std::map<PageId, int> changed_;  // guarded by mutex_
};

/// A pager with a small arena on some device, homes on some tier.
class PagerOn : public testing::TestWithParam<std::tuple<bool, Placement>> {
 protected:
  static constexpr Bytes kArena = 32_KiB;

  PagerOn() {
    Tiers::Options options;
    options.device =
        std::get<0>(GetParam()) ? device::emulated::make_device() : device::host::make_device({});
    options.device_budget = kArena;
    options.host_budget = 64_MiB;
    options.swap.directories = {directory_.path()};
    options.swap.capacity = 16_MiB;
    tiers_ = std::make_unique<Tiers>(options);
    Pager::Options pages;
    pages.fetch_threads = 3;
    pages.staging = 4_KiB;
    pages.least_lookup = 2000;
    pager_ = std::make_unique<Pager>(*tiers_, pages);
  }
  ~PagerOn() override { pager_.reset(); }

  /// A page of `bytes` bytes that are all `value`.
  Page& page(Bytes bytes, unsigned char value) {
    const std::vector<std::byte> contents(bytes, std::byte{value});
    Page& out = pager_->adopt(fmt::format("page {}", value), bytes / 2, 2, std::get<1>(GetParam()),
                              contents.data(), device::Direction::HostToHost);
    bindings_.push_back(std::make_unique<PlainBinding>());
    pager_->set_binding(out, bindings_.back().get());
    return out;
  }
  PlainBinding& binding(const Page& page) { return *bindings_[page.id]; }

  /// What an operator sees of the page.
  std::vector<std::byte> seen(Page& page) {
    const Access access{&page, false};
    Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    const std::vector<std::byte> out(binding(page).data(), binding(page).data() + page.bytes());
    pin.release();
    return out;
  }
  void write(Page& page, std::size_t at, unsigned char value) {
    const Access access{&page, true};
    Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    binding(page).data()[at] = std::byte{value};
    pin.release();
  }

  const io::ScratchDirectory directory_;
  std::unique_ptr<Tiers> tiers_;
  std::vector<std::unique_ptr<PlainBinding>> bindings_;
  std::unique_ptr<Pager> pager_;
};

INSTANTIATE_TEST_SUITE_P(
    , PagerOn, testing::Combine(testing::Bool(), testing::Values(Placement::Host, Placement::Nvme)),
    [](const auto& info) {
      return fmt::format("{}{}", std::get<0>(info.param) ? "Emulated" : "Plain",
                         std::get<1>(info.param) == Placement::Host ? "Host" : "Nvme");
    });

TEST_P(PagerOn, AnAbsentPageSaysItsNameAndWhatToDo) {
  Page& a = page(1000, 1);
  EXPECT_EQ(binding(a).data(), nullptr);
  EXPECT_THAT(binding(a).why(), HasSubstr("page 1"));
  EXPECT_THAT(binding(a).why(), HasSubstr("pin"));
}

TEST_P(PagerOn, PagesComeAndGoWithTheirBytes) {
  std::vector<Page*> pages;
  for (unsigned char i = 0; i < 10; ++i) pages.push_back(&page(6000, i));
  for (int round = 0; round < 3; ++round) {
    for (unsigned char i = 0; i < 10; ++i) {
      EXPECT_EQ(seen(*pages[i]), std::vector<std::byte>(6000, std::byte{i}));
    }
  }
  EXPECT_GT(pager_->stats().evictions, 0U);
  EXPECT_LE(tiers_->arena().stats().peak, kArena);
}

TEST_P(PagerOn, WhatWasWrittenSurvivesEviction) {
  Page& a = page(10'000, 1);
  write(a, 9'999, 77);
  write(a, 0, 78);
  EXPECT_TRUE(pager_->evict(a));
  EXPECT_EQ(binding(a).data(), nullptr);
  const auto bytes = seen(a);
  EXPECT_EQ(bytes[0], std::byte{78});
  EXPECT_EQ(bytes[1], std::byte{1});
  EXPECT_EQ(bytes[9'999], std::byte{77});
}

TEST_P(PagerOn, MastersAreToldWhatChangedSinceTheLastUpdate) {
  AddOne updates(*tiers_, *pager_);
  pager_->set_pending_updates(&updates);
  Page& a = page(10'000, 1);
  pager_->set_attached(a, true);
  write(a, 9'999, 77);
  write(a, 0, 78);
  EXPECT_TRUE(pager_->evict(a));
  write(a, 0, 1);  // as it was: an eviction in between does not count
  EXPECT_TRUE(pager_->evict(a));
  EXPECT_EQ(updates.changed(a), 0) << "not before the step";
  EXPECT_TRUE(pager_->publish(a));
  EXPECT_EQ(updates.changed(a), 1);
  EXPECT_FALSE(pager_->publish(a));
  EXPECT_EQ(seen(a)[0], std::byte{1});
  EXPECT_EQ(seen(a)[9'999], std::byte{77});
  pager_->set_pending_updates(nullptr);
}

TEST_P(PagerOn, AFixedPageTellsWhatWasWrittenToo) {
  AddOne updates(*tiers_, *pager_);
  pager_->set_pending_updates(&updates);
  Page& a = page(10'000, 1);
  pager_->fix(a);
  write(a, 5'000, 77);
  write(a, 5'001, 77);
  EXPECT_FALSE(pager_->evict(a));
  pager_->write_back(a);
  EXPECT_EQ(updates.changed(a), 2);
  EXPECT_EQ(seen(a)[5'000], std::byte{77});
  pager_->set_pending_updates(nullptr);
}

TEST_P(PagerOn, NobodySeesAPageThatOwesAnUpdate) {
  AddOne updates(*tiers_, *pager_);
  pager_->set_pending_updates(&updates);
  Page& a = page(9'000, 5);
  Page& fixed = page(3'000, 9);
  pager_->fix(fixed);
  for (unsigned char step = 1; step < 4; ++step) {
    Page* pending[] = {&a, &fixed};
    pager_->mark_pending(pending);
    EXPECT_LT(pager_->look(a).version, pager_->look(a).wanted);
    EXPECT_EQ(seen(a), std::vector<std::byte>(9'000, std::byte(5 + step)));
    EXPECT_EQ(seen(fixed), std::vector<std::byte>(3'000, std::byte(9 + step)));
  }
  pager_->set_pending_updates(nullptr);
}

TEST_P(PagerOn, AHeldPageStaysWhereItIsAcrossUpdates) {
  AddOne updates(*tiers_, *pager_);
  pager_->set_pending_updates(&updates);
  Page& a = page(9'000, 5);
  std::optional<Hold> hold = pager_->hold(a, nullptr);
  std::byte* const where = binding(a).data();
  ASSERT_NE(where, nullptr);
  EXPECT_FALSE(pager_->evict(a));
  Page* pending[] = {&a};
  pager_->mark_pending(pending);
  EXPECT_EQ(seen(a), std::vector<std::byte>(9'000, std::byte{6}));
  EXPECT_EQ(binding(a).data(), where);
  hold.reset();
  EXPECT_TRUE(pager_->evict(a));
  pager_->set_pending_updates(nullptr);
}

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

TEST_P(PagerOn, RowsAreLookedUpWhereTheyLie) {
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

TEST_P(PagerOn, OthersWaitForALookup) {
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

// A fetch counts as done when its copies are queued. What is cut or dropped then must have been
// read.
TEST(Pager, AHomeStaysUntilTheCopiesThatWereQueuedHaveReadIt) {
  constexpr Bytes kBytes = 1_MiB;
  Tiers::Options options;
  const device::emulated::LinkOptions slow{.bytes_per_second = 20e6};  // a page takes 50 ms
  options.device = device::emulated::make_device({.host_to_device = slow});
  options.device_budget = 2 * kBytes;
  options.host_budget = 64_MiB;
  Tiers tiers(options);
  PlainBinding binding;  // told of the pager's end
  Pager pager(tiers, {});
  const std::vector<std::byte> contents(kBytes, std::byte{7});
  Page& page = pager.adopt("page", kBytes / 2, 2, Placement::Host, contents.data(),
                           device::Direction::HostToHost);
  pager.set_binding(page, &binding);
  const auto consumer = options.device->make_stream({.name = "consumer"});
  const Access access{&page, false};
  Pin pin = pager.touch({&access, 1}, 0, consumer.get());
  const std::byte* const copied = binding.data();
  pin.release();
  pager.set_home_range(page, {0, kBytes / 4}, Placement::Host);
  std::vector<std::vector<std::byte>> others(8, std::vector<std::byte>(kBytes, std::byte{1}));
  consumer->synchronize();
  EXPECT_EQ(std::memcmp(copied, contents.data(), kBytes), 0);
}

TEST(Pager, AHomeStaysUntilLookupsOnAStreamHaveReadIt) {
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

TEST_P(PagerOn, AnOperatorThatIsTooLargeIsNamed) {
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

TEST_P(PagerOn, CrumbsAreLaidOutAfresh) {
  // Three small pages are scattered over the arena, then one operator needs two of them and a large
  // one: all fit, but not between the others.
  Page& a = page(8'192, 1);
  Page& b = page(8'192, 2);
  Page& c = page(8'192, 3);
  Page& d = page(8'192, 4);
  Page& large = page(16'000, 5);
  for (Page* each : {&a, &b, &c, &d}) (void)seen(*each);
  const Access three[] = {{&b, false}, {&d, false}, {&large, false}};
  Pin pin = pager_->touch(three, 0, nullptr);
  for (const Access& access : three) {
    ASSERT_NE(binding(*access.page).data(), nullptr);
    EXPECT_EQ(binding(*access.page).data()[7'000], std::byte(access.page == &b   ? 2
                                                             : access.page == &d ? 4
                                                                                 : 5));
  }
  pin.release();
}

// An operator whose touch has thrown may be about to read the page.
TEST_P(PagerOn, RawPointersFindAPageOnlyWhileItIsPinned) {
  Page& a = page(4_KiB, 1);
  const Access access{&a, false};
  for (int i = 0; i < 2; ++i) {  // absent, then resident
    Pin outer = pager_->touch({&access, 1}, 0, nullptr);
    EXPECT_NE(binding(a).data(), nullptr);
    pager_->touch({&access, 1}, 0, nullptr).release();
    EXPECT_NE(binding(a).data(), nullptr) << "an operator around that one still runs";
    outer.release();
    EXPECT_EQ(pager_->look(a).residency, Residency::Resident);
    EXPECT_EQ(binding(a).data(), nullptr);
    EXPECT_THAT(binding(a).why(), HasSubstr("raw pointer"));
  }
  pager_->rename(a, "another name");
  EXPECT_THAT(binding(a).why(), HasSubstr("another name"));
  {
    const Hold hold = pager_->hold(a, nullptr);
    pager_->touch({&access, 1}, 0, nullptr).release();
    EXPECT_NE(binding(a).data(), nullptr);
  }
  EXPECT_EQ(binding(a).data(), nullptr);
  pager_->fix(a);  // never moves: a pointer stays good
  pager_->touch({&access, 1}, 0, nullptr).release();
  EXPECT_NE(binding(a).data(), nullptr);
}

TEST_P(PagerOn, APageThatGoesAfterRefusalSaysTheReason) {
  Page& a = page(4_KiB, 1);
  Page& b = page(4_KiB, 2);
  for (Page* p : {&a, &b}) {
    const Access access{p, false};
    Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    pin.release();
  }
  EXPECT_TRUE(pager_->evict(a));
  EXPECT_THAT(binding(a).why(), HasSubstr("raw pointer"));
  pager_->refuse("the disk burns");
  EXPECT_TRUE(pager_->evict(b));
  EXPECT_EQ(binding(b).why(), "the disk burns");
}

TEST_P(PagerOn, AfterRefusalEveryTouchThrowsTheReason) {
  Page& a = page(1000, 1);
  pager_->refuse("the disk burns");
  const Access access{&a, false};
  EXPECT_THROW((void)pager_->touch({&access, 1}, 0, nullptr), EngineError);
  EXPECT_EQ(pager_->look(a).pins, 0U);
}

TEST_P(PagerOn, DeadStoragesGiveTheirBytesBack) {
  const Bytes before = tiers_->budget(Tier::Host).used() + tiers_->budget(Tier::Nvme).used();
  Page& a = page(20'000, 1);
  (void)seen(a);
  pager_->storage_died(a);
  (void)page(2, 2);
  EXPECT_LT(tiers_->budget(Tier::Host).used() + tiers_->budget(Tier::Nvme).used(), before + 5'000);
  EXPECT_EQ(tiers_->arena().stats().used, 0U);
}

/// Threads touch pairs of pages that do not fit together with others', write to pages of their own,
/// and evict at random, while updates become pending between rounds.
TEST_P(PagerOn, ManyThreadsAndLittleRoom) {
  constexpr unsigned kThreads = 4;
  constexpr unsigned kPages = 12;
  AddOne updates(*tiers_, *pager_);
  pager_->set_pending_updates(&updates);
  std::vector<Page*> pages;
  for (unsigned char i = 0; i < kPages; ++i) pages.push_back(&page(5'000 + 200U * i, i));
  std::atomic<int> wrong{0};
  for (unsigned char round = 0; round < 4; ++round) {
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(round * kThreads + t);
        for (int i = 0; i < 60; ++i) {
          const std::size_t p = random() % kPages;
          const std::size_t q = random() % kPages;
          std::vector<Access> accesses = {{pages[p], false}};
          if (q != p) accesses.push_back({pages[q], false});
          Pin pin = pager_->touch(accesses, 0, nullptr);
          for (const Access& access : accesses) {
            const std::byte* data = binding(*access.page).data();
            const auto right = std::byte(access.page->id + round);
            if (data == nullptr || data[0] != right || data[access.page->bytes() - 1] != right) {
              ++wrong;
            }
          }
          pin.release();
          if (i % 7 == 0) (void)pager_->evict(*pages[random() % kPages]);
        }
      });
    }
    threads.clear();
    pager_->mark_pending(pages);
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(tiers_->arena().stats().peak, kArena);
  pager_->set_pending_updates(nullptr);
}

}  // namespace
}  // namespace pagoda::pager

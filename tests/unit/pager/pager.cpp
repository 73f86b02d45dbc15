// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/pager.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/pager/add_one.h"
#include "unit/pager/pager_on.h"

namespace pagoda::pager {
namespace {

using testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(, PagerOn, kDevicesAndHomes, kDeviceAndHome);

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

TEST_P(PagerOn, RoomBesideAPageIsWhatNothingLastingTakes) {
  Page& a = page(10'000, 1);  // three of them fit
  Page& b = page(10'000, 2);
  Page& c = page(10'000, 3);
  for (Page* one : {&a, &b, &c}) (void)seen(*one);
  EXPECT_TRUE(pager_->has_room_beside(a)) << "all three may go";
  pager_->fix(a);
  EXPECT_TRUE(pager_->has_room_beside(b)) << "a stays, c may go";
  std::optional<Hold> hold = pager_->hold(b, nullptr);
  EXPECT_FALSE(pager_->has_room_beside(c)) << "a and b stay";
  EXPECT_TRUE(pager_->has_room_beside(b)) << "it is there as it is, and c may go";
  pager_->fix(c);
  EXPECT_FALSE(pager_->has_room_beside(b));
  hold.reset();
  EXPECT_FALSE(pager_->has_room_beside(b)) << "for it, and not for another one";
  EXPECT_TRUE(pager_->has_room_beside(a)) << "b may go";
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

// SPDX-License-Identifier: Apache-2.0
// A version that is complete before its step() is fetched ahead, and seen by nobody until then.
#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/pager/page_record.h"
#include "pagoda/pager/pager.h"
#include "unit/pager/plain_binding.h"
#include "unit/pager/wants_pages.h"

namespace pagoda::pager {
namespace {

constexpr Bytes kBytes = 4_KiB;
constexpr std::byte kOld{1};
constexpr std::byte kNew{2};

class NextVersion : public testing::Test {
 protected:
  explicit NextVersion(std::shared_ptr<device::Device> device = device::host::make_device({}))
      : tiers_(options(std::move(device))), pager_(tiers_, Pager::Options{}) {
    pager_.set_foresight(&foresight_);
    const std::vector<std::byte> old(kBytes, kOld);
    page_ = &pager_.adopt("page", kBytes / 2, 2, Placement::Host, old.data(),
                          device::Direction::HostToHost);
    pager_.set_binding(*page_, &binding_);
    next_ = tiers_.allocate(kBytes, Placement::Host, tag::kGradients, "next");
    const std::vector<std::byte> made(kBytes, kNew);
    tiers_.write(next_, 0, made);
  }
  ~NextVersion() override { pager_.set_foresight(nullptr); }

  static Tiers::Options options(std::shared_ptr<device::Device> device) {
    Tiers::Options out;
    out.device = std::move(device);
    out.device_budget = 8 * kBytes;
    out.host_budget = 64_MiB;
    return out;
  }

  /// The next version is complete, and the page is fetched ahead.
  void offer() {
    ASSERT_TRUE(pager_.supersede(*page_));
    const std::uint64_t before = pager_.stats().prefetches;
    foresight_.want({page_->id});
    pager_.offer_next(*page_, next_);
    ASSERT_EQ(pager_.stats().prefetches, before + 1);
  }
  /// What an operator sees, and how many faults that took.
  std::byte seen() {
    const std::uint64_t before = pager_.stats().faults;
    const Access access{page_, false};
    const Pin pin = pager_.touch({&access, 1}, 0, nullptr);
    faults_ = pager_.stats().faults - before;
    const std::byte* data = binding_.data();
    EXPECT_EQ(std::count(data, data + kBytes, data[0]), static_cast<std::ptrdiff_t>(kBytes));
    return data[0];
  }
  void step() {
    pager_.mark_pending({&page_, 1});
    pager_.exchange_home(*page_, next_);
    pager_.updated(*page_, 1);
    pager_.end_supersede(*page_);
  }

  Tiers tiers_;
  WantsPages foresight_;
  PlainBinding binding_;
  Pager pager_;
  Page* page_ = nullptr;
  Home next_;
  std::uint64_t faults_ = 0;
};

TEST_F(NextVersion, IsThereWhenTheStepIsOver) {
  offer();
  step();
  EXPECT_EQ(seen(), kNew);
  EXPECT_EQ(faults_, 0U);
}

// What is used later must not take its room meanwhile: it would come twice.
TEST_F(NextVersion, IsAwaitedUntilItIsOffered) {
  const std::vector<std::byte> bytes(kBytes, kOld);
  Page& other = pager_.adopt("other", kBytes / 2, 2, Placement::Host, bytes.data(),
                             device::Direction::HostToHost);
  PlainBinding binding;
  pager_.set_binding(other, &binding);
  const auto awaited = [&] {  // every touch makes the pager ask
    const Access access{&other, false};
    pager_.touch({&access, 1}, 0, nullptr).release();
    return foresight_.awaiting_update();
  };
  EXPECT_EQ(awaited(), 0U);
  ASSERT_TRUE(pager_.supersede(*page_));
  EXPECT_EQ(awaited(), 1U);
  pager_.offer_next(*page_, next_);
  EXPECT_EQ(awaited(), 0U);
  pager_.withdraw_next(*page_);
  EXPECT_EQ(awaited(), 1U);
  pager_.mark_pending({&page_, 1});
  EXPECT_EQ(awaited(), 1U);
  pager_.exchange_home(*page_, next_);
  pager_.updated(*page_, 1);
  pager_.end_supersede(*page_);
  EXPECT_EQ(awaited(), 0U);
  ASSERT_TRUE(pager_.supersede(*page_));
  pager_.end_supersede(*page_);
  EXPECT_EQ(awaited(), 0U);
  pager_.set_binding(other, nullptr);
}

TEST_F(NextVersion, IsNotSeenBeforeTheStep) {
  offer();
  EXPECT_EQ(seen(), kOld);  // whether the copy has come already or is on its way
  EXPECT_EQ(faults_, 1U);
  EXPECT_EQ(seen(), kOld);
  EXPECT_EQ(faults_, 0U);
  step();
  EXPECT_EQ(seen(), kNew);
}

TEST_F(NextVersion, IsNeverSeenOnceItIsWithdrawn) {
  offer();
  while (pager_.look(*page_).residency != Residency::Resident) std::this_thread::yield();
  pager_.withdraw_next(*page_);
  tiers_.write(next_, 0, std::vector<std::byte>(kBytes, std::byte{3}));
  step();  // another update of the same number
  EXPECT_EQ(seen(), std::byte{3});
}

TEST_F(NextVersion, IsWithdrawnWithItsWindow) {
  offer();
  pager_.end_supersede(*page_);
  EXPECT_EQ(seen(), kOld);
  next_ = {};
  EXPECT_EQ(seen(), kOld);
}

TEST_F(NextVersion, ComesAndGoesWhileOperatorsRun) {
  for (int round = 0; round < 200; ++round) {
    offer();
    std::jthread reader([&] { EXPECT_EQ(seen(), kOld); });
    if (round % 2 == 0) std::this_thread::yield();
    pager_.withdraw_next(*page_);
    reader.join();
    pager_.end_supersede(*page_);
    ASSERT_TRUE(pager_.evict(*page_));
  }
}

/// A copy of the page takes a second.
class NextVersionOnALink : public NextVersion {
 protected:
  NextVersionOnALink() : NextVersion(device::emulated::make_device(link())) {}

  static device::emulated::Options link() {
    device::emulated::Options out;
    out.host_to_device.bytes_per_second = kBytes;
    out.checker = std::make_shared<device::OrderingChecker>();
    return out;
  }
};

TEST_F(NextVersionOnALink, MayStillBeOnItsWayWhenTheStepIsOver) {
  offer();
  while (pager_.look(*page_).residency != Residency::Resident) std::this_thread::yield();
  step();
  EXPECT_FALSE(record_of(*page_).ready.event->done()) << "step() has waited for the copy";
  tiers_.write(next_, 0, std::vector<std::byte>(kBytes, std::byte{3}));  // the next gradient
  const auto stream = tiers_.device()->make_stream({.name = "operators"});
  const Access access{page_, false};
  const Pin pin = pager_.touch({&access, 1}, 0, stream.get());
  stream->synchronize();
  EXPECT_EQ(std::count(binding_.data(), binding_.data() + kBytes, kNew),
            static_cast<std::ptrdiff_t>(kBytes));
  tiers_.device()->checker()->check();
}

}  // namespace
}  // namespace pagoda::pager

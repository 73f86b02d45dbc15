// SPDX-License-Identifier: Apache-2.0
// Pages and pagers that go while operators of other threads have pages: these end first.
#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/device/host/host_device.h"
#include "pagoda/pager/pager.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::pager {
namespace {

class PagerEnds : public testing::Test {
 protected:
  PagerEnds() : tiers_(options()), pager_(std::make_unique<Pager>(tiers_, Pager::Options{})) {
    const std::vector<std::byte> ones(4_KiB, std::byte{1});
    page_ = &pager_->adopt("page", 2_KiB, 2, Placement::Host, ones.data(),
                           device::Direction::HostToHost);
    pager_->set_binding(*page_, &binding_);
  }
  static Tiers::Options options() {
    Tiers::Options out;
    out.device = device::host::make_device({});
    out.device_budget = 32_KiB;
    out.host_budget = 16_MiB;
    return out;
  }
  /// While an operator of another thread has the page, or has been denied it.
  void expect_to_wait(bool denied, const std::function<void()>& end) {
    std::latch has_it{1};
    std::atomic<bool> ended = false;
    std::jthread other([&] {
      const Access access{page_, false};
      Pin pin;
      if (denied) {
        pager_->deny({&access, 1}, "not now");
      } else {
        pin = pager_->touch({&access, 1}, 0, nullptr);
      }
      has_it.count_down();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ended = true;
      if (denied) pager_->allow({&access, 1});
    });
    has_it.wait();
    end();
    EXPECT_TRUE(ended);
  }

  Tiers tiers_;
  PlainBinding binding_;
  std::unique_ptr<Pager> pager_;
  Page* page_ = nullptr;
};

TEST_F(PagerEnds, APageGoesWhenOperatorsThatHaveItHaveEnded) {
  expect_to_wait(false, [&] { pager_->drop(*page_); });
}

TEST_F(PagerEnds, APageGoesWhenOperatorsThatAreDeniedItHaveEnded) {
  expect_to_wait(true, [&] { pager_->drop(*page_); });
}

TEST_F(PagerEnds, APageGoesWhenOperatorsThatAreDeniedItHaveEndedWithoutItsBindingToo) {
  pager_->set_binding(*page_, nullptr);
  expect_to_wait(true, [&] { pager_->drop(*page_); });
}

/// Lets a hold wait where it has become nobody's operator yet.
class GatedHold final : public PendingUpdates {
 public:
  void wait_for_update(Page& /*page*/) override {}
  const std::byte* wait_for_rows(Page& page, std::span<const Range> /*rows*/) override {
    return Pager::home(page).data();
  }
  void about_to_hold(Page& /*page*/) override {
    begun.count_down();
    gate.wait();
  }
  Range kept(const Page& page, Range /*shard*/) override { return {0, page.elements}; }
  void overwritten(Page& /*page*/, std::uint64_t /*begin*/, std::uint64_t /*count*/,
                   const std::byte* /*before*/, const std::byte* /*after*/) override {}

  std::latch begun{1};
  std::latch gate{1};
};

TEST_F(PagerEnds, WhoeverWaitsForOperatorsDoesNotWaitForAHold) {
  GatedHold updates;
  pager_->set_pending_updates(&updates);
  std::latch done{1};
  std::jthread holder([&] {
    const Hold hold = pager_->hold(*page_, nullptr, false);
    done.wait();
  });
  updates.begun.wait();
  std::jthread opener([&] {  // when the wait below has begun
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    updates.gate.count_down();
  });
  pager_->wait_until_unused(*page_);  // while the hold lives
  done.count_down();
  holder.join();
  pager_->set_pending_updates(nullptr);
}

TEST_F(PagerEnds, APagerGoesWhenOperatorsThatHavePagesHaveEnded) {
  Pager* const pager = pager_.get();
  expect_to_wait(false, [&] {
    pager->~Pager();  // the other thread has the pointer
  });
  ::operator delete(pager_.release());
}

}  // namespace
}  // namespace pagoda::pager

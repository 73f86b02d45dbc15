// SPDX-License-Identifier: Apache-2.0
// A stream that fails under an operator: nothing is lost, nothing stays pinned, and the process
// goes on.
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <latch>
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/pager/page_record.h"
#include "pagoda/pager/pager.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::pager {
namespace {

using testing::HasSubstr;

/// Does nothing, and fails where it is told to.
class FailingStream final : public device::Stream {
 public:
  explicit FailingStream(std::shared_ptr<device::Device> device)
      : Stream(std::move(device), "failing", Ownership::Wrapped, next_id()) {}

  bool records = true;
  bool waits = true;
  bool drains = true;

 private:
  static void fail_unless(bool works, const char* what) {
    if (!works) throw EngineError(what);
  }

  void do_copy(void*, const void*, Bytes, device::Direction, std::string_view) override {}
  void do_fill(void*, std::byte, Bytes, std::string_view) override {}
  void do_enqueue(std::string_view, std::function<void()>) override {}
  void do_record(device::Event&) override { fail_unless(records, "no event can be recorded"); }
  void do_wait(device::Event&, OnFailure) override { fail_unless(waits, "no event can be met"); }
  bool do_idle() override { return true; }
  void do_drain() override { fail_unless(drains, "the device is lost"); }
  void do_rethrow() override {}
};

class FailingPager : public testing::Test {
 protected:
  static constexpr Bytes kPage = 4000;

  FailingPager() {
    Tiers::Options options;
    options.device = device::emulated::make_device();
    options.device_budget = 32_KiB;
    options.host_budget = 16_MiB;
    tiers_ = std::make_unique<Tiers>(options);
    Pager::Options pages;
    pages.fetch_threads = 1;
    pages.staging = 4_KiB;
    pages.least_lookup = 1;
    pager_ = std::make_unique<Pager>(*tiers_, pages);
    stream_ = std::make_shared<FailingStream>(options.device);
  }

  Page& page(unsigned char value) {
    const std::vector<std::byte> contents(kPage, std::byte{value});
    Page& out = pager_->adopt(fmt::format("page {}", value), kPage / 2, 2, Placement::Host,
                              contents.data(), device::Direction::HostToHost);
    bindings_.push_back(std::make_unique<PlainBinding>());
    pager_->set_binding(out, bindings_.back().get());
    return out;
  }
  PlainBinding& binding(const Page& page) { return *bindings_[page.id]; }

  std::byte first_byte(Page& page) {
    const Access access{&page, false};
    Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    const std::byte out = *binding(page).data();
    pin.release();
    return out;
  }

  std::unique_ptr<Tiers> tiers_;
  std::vector<std::unique_ptr<PlainBinding>> bindings_;
  std::unique_ptr<Pager> pager_;
  std::shared_ptr<FailingStream> stream_;
};

TEST_F(FailingPager, AnOperatorThatWroteIsWaitedForWhereItCannotBeMarked) {
  Page& a = page(1);
  const Access write{&a, true};
  Pin pin = pager_->touch({&write, 1}, 0, stream_.get());
  stream_->records = false;
  pin.release();
  EXPECT_EQ(pager_->look(a).pins, 0U);
  EXPECT_EQ(record_of(a).written.event, nullptr);
  stream_->records = true;
  EXPECT_EQ(first_byte(a), std::byte{1});
}

TEST_F(FailingPager, AStreamThatIsLostShowsAtTheNextTouch) {
  Page& a = page(1);
  const Access write{&a, true};
  Pin pin = pager_->touch({&write, 1}, 0, stream_.get());
  stream_->records = stream_->drains = false;
  pin.release();
  EXPECT_EQ(pager_->look(a).pins, 0U);
  try {
    first_byte(a);
    FAIL() << "what the operator wrote is read";
  } catch (const EngineError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the device is lost"));
  }
  stream_->records = stream_->drains = true;
}

TEST_F(FailingPager, ALookupThatCannotBeMarkedIsWaitedFor) {
  Page& a = page(1);
  Lookup lookup{.page = &a, .first = 0, .width = 2, .count = 1, .rows = {}};
  lookup.rows = [] { return std::vector<std::int64_t>{0}; };
  Pin pin = pager_->look_up(lookup, stream_.get());
  ASSERT_TRUE(pin);
  stream_->records = false;
  pin.release();
  EXPECT_EQ(pager_->look(a).lookups, 0U);
  EXPECT_TRUE(record_of(a).reading.empty());
  pin = pager_->look_up(lookup, stream_.get());
  ASSERT_TRUE(pin);
  stream_->drains = false;
  pin.release();
  EXPECT_THROW(first_byte(a), EngineError);
  stream_->records = stream_->drains = true;
}

TEST_F(FailingPager, ATouchThatFailsLeavesNoPinAndNoByteBehind) {
  Page& a = page(1);
  Page& b = page(2);
  {
    const Access write{&a, true};
    Pin pin = pager_->touch({&write, 1}, 0, nullptr);
    *binding(a).data() = std::byte{7};  // not at home yet
    pin.release();
  }
  const std::array<Access, 2> both = {Access{&a, true}, Access{&b, true}};
  stream_->waits = false;
  EXPECT_THROW((void)pager_->touch(both, 0, stream_.get()), EngineError);
  EXPECT_EQ(pager_->look(a).pins, 0U);
  EXPECT_EQ(pager_->look(b).pins, 0U);
  EXPECT_EQ(first_byte(a), std::byte{7});
  EXPECT_EQ(first_byte(b), std::byte{2});
  EXPECT_TRUE(pager_->evict(a));
  EXPECT_EQ(first_byte(a), std::byte{7});
}

TEST_F(FailingPager, ATouchThatFailsInsideAnOperatorLeavesThatItsPins) {
  Page& a = page(1);
  Page& b = page(2);
  const Access outer{&a, false};
  Pin pin = pager_->touch({&outer, 1}, 0, nullptr);
  const std::array<Access, 2> inner = {Access{&a, false}, Access{&b, false}};
  stream_->waits = false;
  EXPECT_THROW((void)pager_->touch(inner, 0, stream_.get()), EngineError);
  EXPECT_EQ(pager_->look(a).pins, 1U);
  EXPECT_NE(binding(a).data(), nullptr);
  // This thread still knows that the pin is its own: it does not wait for itself.
  std::vector<Page*> others;
  std::vector<Access> all;
  for (unsigned char i = 3; i < 12; ++i) all.push_back({&page(i), false});
  EXPECT_THROW((void)pager_->touch(all, 0, nullptr), OperatorTooLarge);
  pin.release();
  EXPECT_EQ(pager_->look(a).pins, 0U);
}

TEST_F(FailingPager, APageDeniedToAnOperatorIsAsBeforeWhenTheOperatorHasEnded) {
  Page& a = page(1);
  Page& b = page(2);
  std::optional<Hold> hold = pager_->hold(b, nullptr);
  std::byte* held = binding(b).data();
  ASSERT_NE(held, nullptr);
  const std::array<Access, 2> both = {Access{&a, false}, Access{&b, false}};
  pager_->deny(both, "too large");
  EXPECT_EQ(binding(a).why(), "too large");
  EXPECT_EQ(binding(b).data(), nullptr);
  pager_->allow(both);
  EXPECT_THAT(binding(a).why(), HasSubstr("raw pointer"));
  EXPECT_EQ(binding(b).data(), held);
  hold.reset();
  // Meanwhile other threads' operators wait.
  pager_->deny({both.data(), 1}, "too large");
  std::atomic<bool> came = false;
  std::thread other([&] {
    EXPECT_EQ(first_byte(a), std::byte{1});
    came = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(came);
  EXPECT_EQ(binding(a).why(), "too large");
  EXPECT_EQ(first_byte(a), std::byte{1}) << "an operator inside this one";
  pager_->evict(a);
  EXPECT_EQ(binding(a).why(), "too large");
  pager_->allow({both.data(), 1});
  other.join();
}

TEST_F(FailingPager, APageIsDeniedToAnOperatorInsideOneThatHasIt) {
  Page& a = page(1);
  const Access access{&a, false};
  Pin outer = pager_->touch({&access, 1}, 0, nullptr);
  std::byte* const data = binding(a).data();
  pager_->deny({&access, 1}, "not now");
  EXPECT_EQ(binding(a).data(), nullptr);
  EXPECT_EQ(binding(a).why(), "not now");
  {  // What runs inside the denied operator may read it, and that alone.
    Pin inner = pager_->touch({&access, 1}, 0, nullptr);
    EXPECT_EQ(binding(a).data(), data);
    EXPECT_EQ(first_byte(a), std::byte{1});
    EXPECT_EQ(binding(a).data(), data);
    inner.release();
    EXPECT_EQ(binding(a).data(), nullptr);
    EXPECT_EQ(binding(a).why(), "not now");
  }
  pager_->allow({&access, 1});
  EXPECT_EQ(binding(a).data(), data) << "the operator around it goes on";
  outer.release();
  EXPECT_EQ(binding(a).data(), nullptr);
}

TEST_F(FailingPager, APageIsDeniedWhenOperatorsOfOtherThreadsAreDoneWithIt) {
  Page& a = page(1);
  Page& b = page(2);
  const Access access{&a, false};
  std::latch has_it{1};
  std::atomic<bool> done = false;
  std::thread other([&] {
    Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    has_it.count_down();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_NE(binding(a).data(), nullptr) << "it is taken away from an operator that runs";
    // Operators inside that one do not wait for who waits for it.
    EXPECT_EQ(first_byte(a), std::byte{1});
    EXPECT_EQ(first_byte(b), std::byte{2});
    done = true;
    pin.release();
  });
  has_it.wait();
  const std::array<Access, 2> both = {access, Access{&b, true}};
  pager_->deny(both, "not now");
  EXPECT_TRUE(done);
  EXPECT_EQ(binding(a).data(), nullptr);
  EXPECT_EQ(binding(b).data(), nullptr);
  pager_->allow(both);
  other.join();
  EXPECT_EQ(first_byte(a), std::byte{1});
}

// Each is inside an operator that has the page which the other one is denied.
TEST_F(FailingPager, TwoThreadsWhoDenyEachOtherGoOn) {
  Page& a = page(1);
  Page& b = page(2);
  std::barrier have{2};
  const auto run = [&](Page& mine, Page& denied) {
    const Access outer{&mine, false};
    const Access inner{&denied, true};
    Pin pin = pager_->touch({&outer, 1}, 0, nullptr);
    have.arrive_and_wait();
    for (int i = 0; i < 100; ++i) {
      pager_->deny({&inner, 1}, "not now");
      EXPECT_EQ(binding(denied).data(), nullptr);
      EXPECT_NE(binding(mine).data(), nullptr);
      pager_->allow({&inner, 1});
      EXPECT_NE(binding(mine).data(), nullptr);
      EXPECT_EQ(first_byte(mine), mine.id == 0 ? std::byte{1} : std::byte{2});
    }
  };
  std::jthread other([&] { run(b, a); });
  run(a, b);
}

/// Another rank, which may be gone.
struct OtherRank final : RemoteShards {
  void pull(PageId, std::uint64_t, std::span<const Piece> pieces) override {
    if (gone) throw EngineError("rank 1 is gone");
    for (const Piece& piece : pieces) std::fill(piece.to.begin(), piece.to.end(), std::byte{5});
  }

  bool gone = false;
};

TEST(FailedRefetch, LeavesAHeldPageWhereItIs) {
  for (const bool emulated : {false, true}) {
    constexpr Bytes kBytes = 256_KiB;
    Tiers::Options options;
    options.device = emulated ? device::emulated::make_device() : device::host::make_device({});
    options.device_budget = 4 * kBytes;
    options.host_budget = 64_MiB;
    Tiers tiers(options);
    OtherRank other;
    PlainBinding binding;
    Pager::Options pages;
    pages.sharding.ranks = 2;
    Pager pager(tiers, pages);
    pager.set_remote(&other);
    const std::vector<std::byte> contents(kBytes, std::byte{5});
    Page& page = pager.adopt("page", kBytes / 2, 2, Placement::Host, contents.data(),
                             device::Direction::HostToHost);
    pager.set_binding(page, &binding);
    pager.set_home_range(page, pager.shard_of(page), Placement::Host);

    std::optional<Hold> hold = pager.hold(page, nullptr);
    std::byte* const data = binding.data();
    other.gone = true;
    Page* const updated = &page;
    const std::vector<Page*> exposed = pager.mark_pending({&updated, 1});
    pager.updated(page, pager.look(page).wanted);
    EXPECT_THROW(pager.refresh(exposed), EngineError);
    EXPECT_EQ(binding.data(), data);
    // It can be read. (On a device, what the fetch had queued before it failed may still fill it.)
    if (!emulated) {
      EXPECT_EQ(data[0], std::byte{5});
    }
    hold.reset();
    EXPECT_TRUE(pager.written().pages.empty());
    other.gone = false;
    const Hold again = pager.hold(page, nullptr);
    EXPECT_EQ(binding.data()[kBytes - 1], std::byte{5});
  }
}

}  // namespace
}  // namespace pagoda::pager

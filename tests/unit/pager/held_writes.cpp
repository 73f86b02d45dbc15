// SPDX-License-Identifier: Apache-2.0
// Writes by raw pointers that come when they must not, under a hold.
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/device/host/host_device.h"
#include "pagoda/pager/pager.h"
#include "unit/io/scratch_directory.h"
#include "unit/pager/add_one.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::pager {
namespace {

constexpr Bytes kHeldBytes = 4_KiB;

/// Holds a page, writes to it and lets go, on a host with or without room for a copy of it.
class HeldWrites : public testing::TestWithParam<bool> {
 protected:
  HeldWrites() : tiers_(options()), pager_(tiers_, Pager::Options{}) {
    const std::vector<std::byte> ones(kHeldBytes, std::byte{1});
    page_ = &pager_.adopt("page", kHeldBytes / 2, 2, Placement::Host, ones.data(),
                          device::Direction::HostToHost);
    pager_.set_binding(*page_, &binding_);
    pager_.fix(*page_);  // there is no other copy of it
    Budget& host = tiers_.budget(Tier::Host);
    // What is left is for checksums of what lies on disk.
    if (GetParam()) others_ = host.reserve(host.limit() - host.used() - kHeldBytes / 4, "others");
  }

  Tiers::Options options() const {
    Tiers::Options out;
    out.device = device::host::make_device({});
    out.device_budget = 8 * kHeldBytes;
    out.host_budget = 16_MiB;
    out.swap.directories = {directory_.path()};  // a copy there could not be read at once
    out.swap.capacity = 16_MiB;
    return out;
  }
  void write_held(RawWrites writes) {
    const Hold hold = pager_.hold(*page_, nullptr, false, writes);
    binding_.data()[7] = std::byte{2};
  }
  std::byte seen() {
    const Access access{page_, false};
    const Pin pin = pager_.touch({&access, 1}, 0, nullptr);
    return binding_.data()[7];
  }

  const io::ScratchDirectory directory_;
  Tiers tiers_;
  PlainBinding binding_;
  Pager pager_;
  Reservation others_;
  Page* page_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(, HeldWrites, testing::Bool(),
                         [](const auto& info) { return info.param ? "FullHost" : "RoomyHost"; });

TEST_P(HeldWrites, Count) {
  write_held(RawWrites::Count);
  EXPECT_EQ(seen(), std::byte{2});
  EXPECT_THAT(pager_.take_reported_writes(), testing::IsEmpty());
}

TEST_P(HeldWrites, AreUndoneAndToldWhereTheyAreRefused) {
  write_held(RawWrites::Refuse);
  EXPECT_EQ(seen(), std::byte{1});
  EXPECT_THAT(pager_.take_reported_writes(), testing::ElementsAre("page"));
}

/// The same with a hold inside the one that writes.
class NestedHolds : public HeldWrites {
 protected:
  void write_held_twice(Page& page, PlainBinding& binding, RawWrites writes) {
    const Hold outer = pager_.hold(page, nullptr, false, writes);
    binding.data()[7] = std::byte{2};
    const Hold inner = pager_.hold(page, nullptr, false, writes);
  }
};

INSTANTIATE_TEST_SUITE_P(, NestedHolds, testing::Values(false),
                         [](const auto& /*info*/) { return "RoomyHost"; });

TEST_P(NestedHolds, CountWhatWasWrittenBefore) {
  const std::vector<std::byte> ones(kHeldBytes, std::byte{1});
  PlainBinding binding;
  Page& page = pager_.adopt("moves", kHeldBytes / 2, 2, Placement::Host, ones.data(),
                            device::Direction::HostToHost);
  pager_.set_binding(page, &binding);
  write_held_twice(page, binding, RawWrites::Count);
  ASSERT_TRUE(pager_.evict(page));
  const Access access{&page, false};
  Pin pin = pager_.touch({&access, 1}, 0, nullptr);
  EXPECT_EQ(binding.data()[7], std::byte{2});
  pin.release();
  pager_.drop(page);
}

TEST_P(NestedHolds, LetMastersFollow) {
  AddOne updates(tiers_, pager_);
  pager_.set_pending_updates(&updates);
  write_held_twice(*page_, binding_, RawWrites::Count);
  pager_.write_back(*page_);
  EXPECT_EQ(updates.changed(*page_), 1);
  pager_.set_pending_updates(nullptr);
}

TEST_P(NestedHolds, UndoWhatIsRefused) {
  write_held_twice(*page_, binding_, RawWrites::Refuse);
  EXPECT_EQ(seen(), std::byte{1});
  EXPECT_THAT(pager_.take_reported_writes(), testing::ElementsAre("page"));
}

}  // namespace
}  // namespace pagoda::pager

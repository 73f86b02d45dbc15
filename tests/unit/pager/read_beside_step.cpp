// SPDX-License-Identifier: Apache-2.0
// A thread that reads a page while another one calls step(): whichever comes first, it sees a whole
// version.
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/pager/pager.h"
#include "unit/io/scratch_directory.h"
#include "unit/pager/add_one.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::pager {
namespace {

constexpr std::byte kBefore{10};
constexpr std::byte kAfter{11};

/// An arena of 32 KiB, and a stream that stands still until gate_ opens.
class ReadBesideStep : public testing::Test {
 protected:
  ReadBesideStep() {
    Tiers::Options options;
    options.device = device::emulated::make_device();
    options.device_budget = 32_KiB;
    options.host_budget = 64_MiB;
    options.swap.directories = {directory_.path()};
    options.swap.capacity = 16_MiB;
    tiers_ = std::make_unique<Tiers>(options);
    Pager::Options pages;
    pages.fetch_threads = 2;
    pages.staging = 4_KiB;
    pager_ = std::make_unique<Pager>(*tiers_, pages);
    updates_ = std::make_unique<AddOne>(*tiers_, *pager_);
    pager_->set_pending_updates(updates_.get());
    stream_ = options.device->make_stream({.name = "operators"});
  }

  Page& page(const char* name, Bytes bytes, Placement home = Placement::Host) {
    const std::vector<std::byte> contents(bytes, kBefore);
    Page& out =
        pager_->adopt(name, bytes / 4, 4, home, contents.data(), device::Direction::HostToHost);
    bindings_.push_back(std::make_unique<PlainBinding>());
    pager_->set_binding(out, bindings_.back().get());
    return out;
  }
  void touch(const std::vector<Access>& accesses, device::Stream* consumer = nullptr) {
    pager_->touch(accesses, 0, consumer).release();
  }
  /// An operator on a stream that does not get to its end.
  void touch_behind_gate(Page& page, bool write) {
    stream_->enqueue("gate", [this] { gate_.wait(); });
    touch({{&page, write}}, stream_.get());
  }
  std::byte seen(Page& page) {
    const Access access{&page, false};
    const Pin pin = pager_->touch({&access, 1}, 0, nullptr);
    return bindings_[page.id]->data()[0];
  }
  void wait_until(const Page& page, Residency residency) const {
    while (pager_->look(page).residency != residency) std::this_thread::yield();
  }
  void step(Page& page) {
    Page* const pending = &page;
    pager_->mark_pending({&pending, 1});
  }

  const io::ScratchDirectory directory_;
  std::latch gate_{1};
  std::unique_ptr<Tiers> tiers_;
  std::vector<std::unique_ptr<PlainBinding>> bindings_;
  std::unique_ptr<Pager> pager_;
  std::unique_ptr<AddOne> updates_;
  std::shared_ptr<device::Stream> stream_;
};

TEST_F(ReadBesideStep, WhichMakesRoomByAWriteBack) {
  Page& written = page("written", 32_KiB);
  Page& read = page("read", 16_KiB, Placement::Nvme);
  touch_behind_gate(written, true);
  std::jthread reader([&] { touch({{&read, false}}); });
  wait_until(written, Residency::Leaving);  // the reader has pinned its page
  step(read);
  gate_.count_down();
  reader.join();
  EXPECT_EQ(seen(read), kAfter);
}

TEST_F(ReadBesideStep, WhichLaysItsPagesOutAfresh) {
  Page& first = page("first", 4_KiB);
  Page& second = page("second", 8_KiB);
  Page& third = page("third", 12_KiB);
  Page& small = page("small", 12_KiB, Placement::Nvme);
  Page& large = page("large", 20_KiB, Placement::Nvme);
  touch({{&first, false}});
  touch({{&second, false}});
  touch_behind_gate(third, false);
  ASSERT_TRUE(pager_->evict(third));
  // The small one comes where the third one was, behind the gate; the large one does not fit beside
  // it, before or after.
  std::jthread reader([&] { touch({{&small, false}, {&large, false}}); });
  wait_until(small, Residency::Fetching);  // the reader waits until it can be moved
  step(large);
  gate_.count_down();
  reader.join();
  EXPECT_EQ(seen(large), kAfter);
}

}  // namespace
}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/pager/page_record.h"
#include "pagoda/pager/pager.h"
#include "unit/pager/add_one.h"
#include "unit/pager/plain_binding.h"

namespace pagoda::pager {

/// A page on the emulated device, and operators whose kernels run later than they are queued.
class QueuedKernels : public testing::Test {
 protected:
  static constexpr Bytes kBytes = 8_KiB;

  explicit QueuedKernels(Bytes element_size = 2)
      : tiers_(options()), pager_(tiers_, {}), updates_(tiers_, pager_) {
    pager_.set_pending_updates(&updates_);
    const std::vector<std::byte> contents(kBytes, std::byte{10});
    page_ = &pager_.adopt("page", kBytes / element_size, element_size, Placement::Host,
                          contents.data(), device::Direction::HostToHost);
    pager_.set_binding(*page_, &binding_);
    stream_ = tiers_.device()->make_stream({.name = "operators"});
  }

  static Tiers::Options options() {
    device::emulated::Options emulated;
    emulated.checker = std::make_shared<device::OrderingChecker>();
    Tiers::Options out;
    out.device = device::emulated::make_device(emulated);
    out.device_budget = 8 * kBytes;
    out.host_budget = 64_MiB;
    return out;
  }

  void queue(std::string_view label, std::function<void()> kernel) {
    device::emulated::run_for(*stream_, 20'000'000, "others");
    stream_->enqueue(label, std::move(kernel));
  }
  /// Where the page is, for kernels.
  std::byte* data() { return const_cast<std::byte*>(record_of(*page_).device_block().data()); }
  /// An operator that reads the page when its stream gets there.
  void queue_read() {
    const Access access{page_, false};
    const Pin pin = pager_.touch({&access, 1}, 0, stream_.get());
    queue("read", [from = binding_.data(), this] { read_.push_back(from[0]); });
  }
  /// A kernel that fills the page when its stream gets there.
  void queue_fill(unsigned char value) {
    queue("fill", [to = data(), value] { std::fill_n(to, kBytes, std::byte{value}); });
  }
  void step() {
    pager_.find_raw_writes();
    for (Page* page : pager_.written().pages) pager_.publish(*page);
    const std::vector<Page*> exposed = pager_.mark_pending({&page_, 1});
    updates_.wait_for_update(*page_);
    pager_.refresh(exposed);
  }
  void expect_read(const std::vector<std::byte>& values) {
    stream_->synchronize();
    EXPECT_EQ(read_, values);
    tiers_.device()->checker()->check();
  }

  Tiers tiers_;
  PlainBinding binding_;
  Pager pager_;
  AddOne updates_;
  Page* page_ = nullptr;
  std::vector<std::byte> read_;
  std::shared_ptr<device::Stream> stream_;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
// Kernels that were queued before step() see the values of before it, also where the next version
// comes to the same place.
#include <algorithm>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "unit/pager/queued_kernels.h"

namespace pagoda::pager {
namespace {

using QueuedReaders = QueuedKernels;

TEST_F(QueuedReaders, OfAPageThatLivesOnTheDevice) {
  pager_.fix(*page_);
  queue_read();
  step();
  queue_read();
  expect_read({std::byte{10}, std::byte{11}});
}

TEST_F(QueuedReaders, ThatNoOperatorHasAnnounced) {  // a graph that is replayed
  pager_.fix(*page_);
  queue("read", [this] { read_.push_back(data()[0]); });
  pager_.note_user(*stream_);
  step();
  queue_read();
  expect_read({std::byte{10}, std::byte{11}});
}

TEST_F(QueuedReaders, OfACudaGraphThatIsReplayedAfterTheStep) {
  pager_.fix(*page_);
  const auto capture = [this] {
    device::emulated::set_capturing(*stream_, true);
    const Access access{page_, false};
    pager_.touch({&access, 1}, 0, stream_.get()).release();
    device::emulated::set_capturing(*stream_, false);
    EXPECT_EQ(binding_.data(), data());
  };
  const auto replay = [this] { queue("replay", [this] { read_.push_back(data()[0]); }); };
  capture();
  replay();
  pager_.note_user(*stream_);
  pager_.refresh(pager_.mark_pending({&page_, 1}));  // as step() does
  replay();
  expect_read({std::byte{10}, std::byte{11}});
}

TEST_F(QueuedReaders, OfACudaGraphThatIsCapturedBeforeTheUpdate) {
  pager_.fix(*page_);
  EXPECT_TRUE(pager_.mark_pending({&page_, 1}).empty());
  device::emulated::set_capturing(*stream_, true);
  const Access access{page_, false};
  pager_.touch({&access, 1}, 0, stream_.get()).release();
  device::emulated::set_capturing(*stream_, false);
  EXPECT_EQ(binding_.data(), data());
  queue("replay", [this] { read_.push_back(data()[0]); });
  expect_read({std::byte{11}});
}

TEST_F(QueuedReaders, OfAPageThatIsHeld) {
  const Hold hold = pager_.hold(*page_, stream_.get());
  queue_read();
  step();
  queue_read();
  expect_read({std::byte{10}, std::byte{11}});
}

TEST_F(QueuedReaders, OfAPageThatIsLoaded) {
  pager_.fix(*page_);
  queue_read();
  pager_.write_home(*page_, kBytes, [](std::span<std::byte> bytes) {
    std::fill(bytes.begin(), bytes.end(), std::byte{12});
  });
  queue_read();
  expect_read({std::byte{10}, std::byte{12}});
}

TEST_F(QueuedReaders, OfAPageThatIsOverwritten) {
  auto other = tiers_.arena().allocate(kBytes, *stream_, "other");
  stream_->fill_async(other.on(*stream_), std::byte{13}, kBytes);
  stream_->synchronize();
  queue_read();
  pager_.overwrite(*page_, other.data());
  queue_read();
  expect_read({std::byte{10}, std::byte{13}});
}

}  // namespace
}  // namespace pagoda::pager

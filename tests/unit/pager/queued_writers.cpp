// SPDX-License-Identifier: Apache-2.0
// What kernels write that were queued before step() is there before the update is made.
#include <optional>

#include <gtest/gtest.h>

#include "unit/pager/queued_kernels.h"

namespace pagoda::pager {
namespace {

/// Pages of bf16, which have masters, and of fp32, which have none.
class QueuedWriters : public QueuedKernels, public testing::WithParamInterface<Bytes> {
 protected:
  QueuedWriters() : QueuedKernels(GetParam()) { pager_.set_attached(*page_, true); }

  void expect_updated(unsigned char value) {
    queue_read();
    expect_read({std::byte{value}});
    EXPECT_EQ(updates_.changed(*page_), page_->element_size == 2 ? static_cast<int>(kBytes) : 0);
  }
};

TEST_P(QueuedWriters, ToAPageThatLivesOnTheDevice) {
  pager_.fix(*page_);
  {
    const Access access{page_, true};
    const Pin pin = pager_.touch({&access, 1}, 0, stream_.get());
    queue_fill(20);
  }
  step();
  expect_updated(21);
}

TEST_P(QueuedWriters, UnderAPin) {
  {
    const Hold hold = pager_.hold(*page_, stream_.get(), /*write=*/true);
    queue_fill(20);
  }
  step();
  expect_updated(21);
}

TEST_P(QueuedWriters, UnderAPinThatStays) {
  const Hold hold = pager_.hold(*page_, stream_.get(), /*write=*/true);
  queue_fill(20);
  step();
  expect_updated(21);
}

TEST_P(QueuedWriters, UnderAPinOfAPageThatLivesOnTheDevice) {
  pager_.fix(*page_);
  std::optional<Hold> hold = pager_.hold(*page_, stream_.get(), /*write=*/true);
  queue_fill(20);
  if (page_->element_size == 4) hold.reset();
  step();
  expect_updated(21);
}

INSTANTIATE_TEST_SUITE_P(Elements, QueuedWriters, testing::Values(2, 4));

}  // namespace
}  // namespace pagoda::pager

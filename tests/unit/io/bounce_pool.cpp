// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/bounce_pool.h"

#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace pagoda::io {
namespace {

TEST(BouncePool, HandsABufferToWhoWaitedLongest) {
  BouncePool pool(2, 8192);
  BouncePool::Waiter a;
  BouncePool::Waiter b;
  std::byte* first = pool.acquire(a);
  std::byte* second = pool.acquire(a);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second) % 4096, 0U);
  EXPECT_EQ(pool.acquire(a), nullptr);
  EXPECT_EQ(pool.acquire(b), nullptr);
  EXPECT_EQ(pool.release(second), &a);
  EXPECT_EQ(pool.release(first), &b);
  EXPECT_EQ(pool.release(second), nullptr);
  EXPECT_EQ(pool.acquire(a), second);
}

TEST(BouncePool, NeedsABuffer) {
  EXPECT_THROW(BouncePool(0, 4096), UserError);
}

}  // namespace
}  // namespace pagoda::io

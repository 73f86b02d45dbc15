// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/ranked_mutex.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <type_traits>

#include <gtest/gtest.h>

namespace pagoda {
namespace {

using Outer = RankedMutex<LockRank::Reducer>;
using Inner = RankedMutex<LockRank::PageTable>;

TEST(RankedMutex, LocksInOrderAndGivesBackInAny) {
  Outer outer;
  Inner inner;
  std::unique_lock first(outer);
  std::unique_lock second(inner);
  first.unlock();
  second.unlock();
  const std::lock_guard alone(inner);
}

TEST(RankedMutex, IsWaitedWith) {
  Inner mutex;
  Condition changed;
  bool told = false;
  std::jthread teller([&] {
    const std::lock_guard lock(mutex);
    told = true;
    changed.notify_all();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return told; });
  EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(1), [&] { return told; }));
  EXPECT_FALSE(changed.wait_for(lock, std::chrono::nanoseconds(1), [] { return false; }));
  EXPECT_TRUE(lock.owns_lock());
}

TEST(RankedMutex, RecursiveOnesAreTakenAgain) {
  RankedRecursiveMutex<LockRank::Stream> mutex;
  const std::lock_guard once(mutex);
  const std::lock_guard twice(mutex);
}

#ifdef PAGODA_CHECK_LOCKS

TEST(RankedMutexDeathTest, AWrongOrderEndsTheProcessWithBothNames) {
  Outer outer;
  Inner inner;
  EXPECT_DEATH(
      {
        const std::lock_guard first(inner);
        const std::lock_guard second(outer);
      },
      "lock 'Reducer' is taken while 'PageTable' is held");
}

TEST(RankedMutexDeathTest, SoDoTwoOfOneRank) {
  Inner one;
  Inner other;
  EXPECT_DEATH(
      {
        const std::lock_guard first(one);
        const std::lock_guard second(other);
      },
      "lock 'PageTable' is taken while 'PageTable' is held");
}

TEST(RankedMutexDeathTest, AndAWaitUnderALockThatOthersNeed) {
  Outer outer;
  Inner inner;
  Condition never;
  EXPECT_DEATH(
      {
        const std::lock_guard held(outer);
        std::unique_lock lock(inner);
        never.wait(lock, [] { return false; });
      },
      "a thread waits while it holds lock 'Reducer'");
  EXPECT_DEATH(
      {
        const std::lock_guard held(outer);
        require_may_wait();
      },
      "a thread waits while it holds lock 'Reducer'");
}

TEST(RankedMutex, SomeMayBeHeldInAWait) {
  RankedMutex<LockRank::Homes> homes;
  const std::lock_guard held(homes);
  require_may_wait();
}

TEST(RankedMutex, AThreadHasNothingToDoWithTheLocksOfOthers) {
  Outer outer;
  Inner inner;
  const std::lock_guard held(inner);
  std::jthread([&] { const std::lock_guard lock(outer); }).join();
}

#else

TEST(RankedMutex, CostsNothingWhereItIsNotChecked) {
  static_assert(std::is_same_v<Outer, std::mutex> && std::is_same_v<Inner, std::mutex>);
  static_assert(std::is_same_v<Condition, std::condition_variable>);
}

#endif

}  // namespace
}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/block_locks.h"

#include <vector>

#include <gtest/gtest.h>

namespace pagoda::io {
namespace {

using Claim = BlockLocks::Claim;

Claim reader(Bytes begin, Bytes end) {
  Claim claim;
  claim.begin = begin;
  claim.end = end;
  return claim;
}
Claim writer(Bytes begin, Bytes end) {
  Claim claim = reader(begin, end);
  claim.exclusive = true;
  return claim;
}
std::vector<Claim*> released(BlockLocks& locks, Claim& claim) {
  std::vector<Claim*> granted;
  for (Claim* next = locks.release(claim); next != nullptr; next = BlockLocks::next(*next)) {
    granted.push_back(next);
  }
  return granted;
}

TEST(BlockLocks, ReadersShareAndWritersDoNot) {
  BlockLocks locks(1_MiB);
  Claim a = reader(0, 100);
  Claim b = reader(50, 150);
  Claim w = writer(90, 110);
  Claim apart = writer(150, 160);
  EXPECT_TRUE(locks.acquire(a));
  EXPECT_TRUE(locks.acquire(b));
  EXPECT_FALSE(locks.acquire(w));
  EXPECT_TRUE(locks.acquire(apart));
  EXPECT_TRUE(released(locks, a).empty());
  EXPECT_EQ(released(locks, b), std::vector{&w});
  EXPECT_TRUE(released(locks, w).empty());
  EXPECT_TRUE(released(locks, apart).empty());
}

TEST(BlockLocks, WhoCameFirstGoesFirst) {
  BlockLocks locks(1_MiB);
  Claim w1 = writer(0, 10);
  Claim w2 = writer(0, 10);
  Claim r1 = reader(0, 10);
  Claim r2 = reader(5, 10);
  Claim w3 = writer(0, 10);
  EXPECT_TRUE(locks.acquire(w1));
  for (Claim* claim : {&w2, &r1, &r2, &w3}) EXPECT_FALSE(locks.acquire(*claim));
  EXPECT_EQ(released(locks, w1), std::vector{&w2});
  EXPECT_EQ(released(locks, w2), (std::vector{&r1, &r2}));
  EXPECT_TRUE(released(locks, r2).empty());
  EXPECT_EQ(released(locks, r1), std::vector{&w3});
  EXPECT_TRUE(released(locks, w3).empty());
}

TEST(BlockLocks, CellsThatShareABucketDoNotWaitForEachOther) {
  BlockLocks locks(4096);
  Claim near = writer(0, 4096);
  Claim far = writer(256 * 4096, 257 * 4096);
  EXPECT_TRUE(locks.acquire(near));
  EXPECT_TRUE(locks.acquire(far));
  EXPECT_TRUE(released(locks, near).empty());
  EXPECT_TRUE(released(locks, far).empty());
}

}  // namespace
}  // namespace pagoda::io

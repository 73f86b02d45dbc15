// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/access_map.h"

#include <gtest/gtest.h>

namespace pagoda::device {
namespace {

Access by(std::size_t actor, std::uint64_t time = 1) {
  return {actor, time, std::make_shared<const std::string>("test")};
}
bool never(const Access&) {
  return false;
}
bool always(const Access&) {
  return true;
}

TEST(AccessMap, AReadConflictsWithAnUnorderedWriteOnly) {
  AccessMap map;
  EXPECT_FALSE(map.read(0, 10, by(1), never));
  EXPECT_FALSE(map.read(0, 10, by(2), never));
  EXPECT_FALSE(map.write(20, 30, by(1), never));
  EXPECT_FALSE(map.read(10, 20, by(2), never));
  const auto conflict = map.read(25, 40, by(2), never);
  ASSERT_TRUE(conflict);
  EXPECT_TRUE(conflict->earlier_wrote);
  EXPECT_EQ(conflict->begin, 25u);
  EXPECT_EQ(conflict->end, 30u);
}

TEST(AccessMap, AWriteConflictsWithUnorderedReadsAndWrites) {
  AccessMap map;
  map.read(10, 20, by(1), never);
  const auto read = map.write(0, 11, by(2), never);
  ASSERT_TRUE(read);
  EXPECT_FALSE(read->earlier_wrote);
  EXPECT_EQ(read->earlier.actor, 1u);
  const auto write = map.write(10, 11, by(3), never);
  ASSERT_TRUE(write);
  EXPECT_TRUE(write->earlier_wrote);
  EXPECT_EQ(write->earlier.actor, 2u);
}

TEST(AccessMap, OrderedAccessesAreForgottenByTheNextWrite) {
  AccessMap map;
  for (std::uintptr_t at = 0; at < 100; at += 10) map.write(at, at + 10, by(1), always);
  for (std::uintptr_t at = 5; at < 95; at += 10) map.read(at, at + 10, by(2), always);
  EXPECT_GT(map.entries(), 10u);
  EXPECT_FALSE(map.write(0, 100, by(3), always));
  EXPECT_EQ(map.entries(), 1u);
}

TEST(AccessMap, AnActorsReadReplacesItsEarlierOne) {
  AccessMap map;
  map.read(0, 10, by(1, 1), always);
  map.read(0, 10, by(1, 2), always);
  int asked = 0;
  map.write(0, 10, by(2), [&](const Access& earlier) {
    ++asked;
    EXPECT_EQ(earlier.time, 2u);
    return true;
  });
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace pagoda::device

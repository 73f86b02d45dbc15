// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/checksum.h"

#include <gtest/gtest.h>

#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

TEST(Checksum, IsXxh3) {
  // The published value of XXH3_64bits of the empty input.
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2ULL);
}

TEST(Checksum, EveryBuildGivesTheSameBits) {
  const auto bytes = random_bytes(70'000, 1);
  for (const std::size_t length :
       {0U, 1U, 3U, 16U, 17U, 128U, 129U, 240U, 241U, 1024U, 4095U, 4096U, 65'536U, 69'999U}) {
    const std::uint64_t expected = checksum_builds::sse2(bytes.data() + 1, length);
    EXPECT_EQ(checksum({bytes.data() + 1, length}), expected) << length;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      EXPECT_EQ(checksum_builds::avx2(bytes.data() + 1, length), expected) << length;
    }
    if (__builtin_cpu_supports("avx512f")) {
      EXPECT_EQ(checksum_builds::avx512(bytes.data() + 1, length), expected) << length;
    }
#endif
  }
}

TEST(Checksum, ABitMatters) {
  auto bytes = random_bytes(65'536, 1);
  const std::uint64_t before = checksum(bytes);
  bytes[40'000] ^= std::byte{16};
  EXPECT_NE(checksum(bytes), before);
}

}  // namespace
}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/bytes.h"

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

TEST(ParseBytes, ReadsWhatPeopleWrite) {
  EXPECT_EQ(parse_bytes("0"), 0U);
  EXPECT_EQ(parse_bytes("4096"), 4096U);
  EXPECT_EQ(parse_bytes("17B"), 17U);
  EXPECT_EQ(parse_bytes("8GiB"), 8_GiB);
  EXPECT_EQ(parse_bytes("512M"), 512_MiB);
  EXPECT_EQ(parse_bytes("512MiB"), 512_MiB);
  EXPECT_EQ(parse_bytes("512MB"), 512'000'000U);
  EXPECT_EQ(parse_bytes("1.5GiB"), 1536_MiB);
  EXPECT_EQ(parse_bytes("1.5 gb"), 1'500'000'000U);
  EXPECT_EQ(parse_bytes("  2 k "), 2_KiB);
  EXPECT_EQ(parse_bytes("3TiB"), 3 * 1024_GiB);
  EXPECT_EQ(parse_bytes("1P"), 1024 * 1024_GiB);
  EXPECT_EQ(parse_bytes("0.1K"), 102U) << "fractions are rounded down to a byte";
  EXPECT_EQ(parse_bytes("007"), 7U);
  EXPECT_EQ(parse_bytes("18446744073709551615"), std::numeric_limits<Bytes>::max());
}

class ParseBytesRejects : public ::testing::TestWithParam<const char*> {};

TEST_P(ParseBytesRejects, WithTheTextInTheMessage) {
  try {
    const Bytes bytes = parse_bytes(GetParam());
    FAIL() << GetParam() << " was read as " << bytes;
  } catch (const UserError& e) {
    EXPECT_THAT(e.what(), ::testing::HasSubstr(std::string("'") + GetParam() + "'"));
    EXPECT_THAT(e.what(), ::testing::HasSubstr("8GiB")) << "the message shows how to write it";
  }
}

INSTANTIATE_TEST_SUITE_P(Nonsense, ParseBytesRejects,
                         ::testing::Values("", "   ", "GiB", ".", ".B", "-1", "+1", "1e9", "0x10",
                                           "nan", "inf", "1,5G", "1.5.2G", "1.G", "5 XB", "5 GiBB",
                                           "5 G B", "8 GiB 2", "0.5", "1.5B"));
INSTANTIATE_TEST_SUITE_P(Overflow, ParseBytesRejects,
                         ::testing::Values("18446744073709551616", "16384P", "18014398509481984K",
                                           "99999999999999999999999", "1e30",
                                           "340282366920938463463374607431768211456",
                                           "0.00000000000001G"));

TEST(FormatBytes, IsShortAndExactWhereItCanBe) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1 KiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(512_MiB), "512 MiB");
  EXPECT_EQ(format_bytes(8_GiB), "8 GiB");
  EXPECT_EQ(format_bytes(8_GiB + 1), "8.00 GiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<Bytes>::max()), "16384.00 PiB");
}

TEST(FormatBytes, ParsesBack) {
  for (Bytes bytes = 1; bytes < (Bytes{1} << 60); bytes *= 2) {
    EXPECT_EQ(parse_bytes(format_bytes(bytes)), bytes);
  }
}

TEST(FormatBytes, UpIsNeverLess) {
  EXPECT_EQ(format_bytes_up(1023), "1023 B");
  EXPECT_EQ(format_bytes_up(512_MiB), "512 MiB");
  EXPECT_EQ(format_bytes_up(8_GiB + 1), "8.01 GiB");
  EXPECT_EQ(format_bytes_up(8_GiB - 1), "8 GiB");
  for (Bytes bytes = 1; bytes < (Bytes{1} << 60); bytes = bytes * 3 + 1) {
    const Bytes back = parse_bytes(format_bytes_up(bytes));
    EXPECT_GE(back, bytes);
    EXPECT_LE(back - bytes, bytes / 100);
  }
}

TEST(Align, UpAndDown) {
  EXPECT_EQ(align_up(0, 4096), 0U);
  EXPECT_EQ(align_up(1, 4096), 4096U);
  EXPECT_EQ(align_up(4096, 4096), 4096U);
  EXPECT_EQ(align_down(4097, 4096), 4096U);
  EXPECT_TRUE(is_power_of_two(1));
  EXPECT_FALSE(is_power_of_two(0));
  EXPECT_FALSE(is_power_of_two(3));
}

}  // namespace
}  // namespace pagoda

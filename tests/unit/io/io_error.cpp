// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/io_error.h"

#include <cerrno>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace pagoda::io {
namespace {

using ::testing::HasSubstr;

TEST(IoError, SaysWhereAndWhat) {
  const IoError error("read failed", "/disk/#12", 4096, 8192, EIO);
  EXPECT_EQ(error.message(), "read failed: EIO: Input/output error");
  EXPECT_THAT(error.what(), HasSubstr("[path=/disk/#12, offset=4096, length=8192, errno=5]"));
  EXPECT_EQ(error.path(), "/disk/#12");
  EXPECT_EQ(error.offset(), 4096U);
  EXPECT_EQ(error.length(), 8192U);
  EXPECT_EQ(error.error_number(), EIO);
}

TEST(IoError, AChecksumIsOneToo) {
  const ChecksumError error("/disk/#12", 0, 4096, 0xab, 0xcd);
  EXPECT_EQ(error.error_number(), EBADMSG);
  EXPECT_EQ(error.expected(), 0xabU);
  EXPECT_THAT(error.what(), HasSubstr("actual=00000000000000cd"));
}

TEST(IoError, AnUnknownErrnoIsPrintedAsANumber) {
  EXPECT_EQ(errno_text(4321), "errno 4321: unknown error");
}

}  // namespace
}  // namespace pagoda::io

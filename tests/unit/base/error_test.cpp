// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace pagoda {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

template <class E, class Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(Error, PrintsMessageAndContextAndLogsThePlace) {
  const EngineError error("read failed", {context("path", "/x"), context("offset", 4096)});
  EXPECT_STREQ(error.what(), "read failed [path=/x, offset=4096]");
  EXPECT_THAT(error.located(), StartsWith("read failed [path=/x, offset=4096] (tests/unit/base/"));
  EXPECT_EQ(error.message(), "read failed");
  EXPECT_NE(error.where().line(), 0U);
}

TEST(Error, FramesAboveAddWhatTheyKnow) {
  EngineError error("checksum mismatch");
  error.add_context(context("page", "lm_head.weight"));
  EXPECT_STREQ(error.what(), "checksum mismatch [page=lm_head.weight]");
}

TEST(Error, FamiliesAreDistinct) {
  EXPECT_THROW(throw UserError("u"), UserError);
  EXPECT_THROW(throw EngineError("e"), EngineError);
  static_assert(!std::is_base_of_v<UserError, EngineError>);
  static_assert(!std::is_base_of_v<EngineError, UserError>);
  static_assert(std::is_base_of_v<Error, UserError> && std::is_base_of_v<Error, EngineError>);
}

TEST(Check, PassesSilentlyAndEvaluatesOnce) {
  int calls = 0;
  PAGODA_CHECK(++calls == 1);
  PAGODA_CHECK_EQ(++calls, 2, "never printed");
  EXPECT_EQ(calls, 2);
}

TEST(Check, ComparisonPrintsBothValuesAndTheReason) {
  const int have = 3;
  EXPECT_THAT(message_of<EngineError>([&] { PAGODA_CHECK_EQ(have, 4, "shard of rank {}", 7); }),
              AllOf(StartsWith("check failed: have == 4 (3 vs 4): shard of rank 7"),
                    HasSubstr("error_test.cpp:")));
  EXPECT_THAT(message_of<UserError>([&] { PAGODA_REQUIRE_LT(5, have); }),
              HasSubstr("5 < have (5 vs 3)"));
  // With words, a user sees those, not the code.
  EXPECT_THAT(message_of<UserError>([&] { PAGODA_REQUIRE_LT(5, have, "no group {}", 5); }),
              StartsWith("no group 5 (5 vs 3)"));
}

TEST(Check, EveryComparisonFailsWhenItShould) {
  EXPECT_THROW(PAGODA_CHECK_NE(1, 1), EngineError);
  EXPECT_THROW(PAGODA_CHECK_LT(1, 1), EngineError);
  EXPECT_THROW(PAGODA_CHECK_LE(2, 1), EngineError);
  EXPECT_THROW(PAGODA_CHECK_GT(1, 1), EngineError);
  EXPECT_THROW(PAGODA_CHECK_GE(0, 1), EngineError);
  EXPECT_THROW(PAGODA_REQUIRE(false), UserError);
  EXPECT_THROW(PAGODA_REQUIRE_EQ(1, 2), UserError);
  EXPECT_THROW(PAGODA_REQUIRE_NE(1, 1), UserError);
  EXPECT_THROW(PAGODA_REQUIRE_LE(2, 1), UserError);
  EXPECT_THROW(PAGODA_REQUIRE_GT(1, 1), UserError);
  EXPECT_THROW(PAGODA_REQUIRE_GE(0, 1), UserError);
}

TEST(Check, ValuesThatCannotBePrintedStillFail) {
  struct Opaque {
    bool operator==(const Opaque&) const { return false; }
  };
  EXPECT_THAT(message_of<EngineError>([] { PAGODA_CHECK_EQ(Opaque{}, Opaque{}); }),
              HasSubstr("<unprintable> vs <unprintable>"));
}

TEST(Check, DoesNotDependOnNdebug) {
#ifndef NDEBUG
  FAIL() << "NDEBUG must be defined in every build type";
#endif
  EXPECT_THROW(PAGODA_CHECK(1 + 1 == 3), EngineError);
}

}  // namespace
}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/log.h"

#include <cstdlib>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Log, PrintsComponentMessageAndFields) {
  std::vector<std::string> lines;
  {
    const log::Capture capture([&](log::Level, const std::string& line) { lines.push_back(line); });
    log::info("io", "engine chosen", {{"engine", "uring"}, {"depth", 64}});
    log::warn("io", "no direct I/O", {{"path", "/a b"}, {"why", ""}});
    log::debug("pager", "plain");
  }
  log::error("test", "shown on standard error, not captured");
  EXPECT_THAT(lines,
              ElementsAre("info  io: engine chosen engine=uring depth=64",
                          "warn  io: no direct I/O path=\"/a b\" why=\"\"", "debug pager: plain"));
}

TEST(Log, LevelDecidesWhatIsShown) {
  const log::Level before = log::level();
  log::set_level(log::Level::Error);
  EXPECT_FALSE(log::enabled(log::Level::Warn));
  EXPECT_TRUE(log::enabled(log::Level::Error));
  ::testing::internal::CaptureStderr();
  log::warn("test", "hidden");
  log::error("test", "shown");
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("error test: shown\n"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("hidden")));
  log::set_level(before);
}

TEST(Log, UnknownLevelNamesTheKnownOnes) {
  EXPECT_EQ(log::parse_level("debug"), log::Level::Debug);
  EXPECT_EQ(log::parse_level("off"), log::Level::Off);
  try {
    log::parse_level("loud");
    FAIL();
  } catch (const UserError& e) {
    EXPECT_THAT(e.what(), HasSubstr("'loud' is not a log level (one of trace, debug, info, warn"));
  }
}

TEST(Log, OnlyOneCapture) {
  const log::Capture capture([](log::Level, const std::string&) {});
  EXPECT_THROW(log::Capture([](log::Level, const std::string&) {}), EngineError);
}

// The format is read once a process, so the test looks at a process of its own.
TEST(LogDeathTest, JsonLinesCanBeParsed) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  ::setenv("PAGODA_LOG_FORMAT", "json", 1);
  ::setenv("PAGODA_LOG", "info", 1);
  const auto is_json = ::testing::Truly([](const std::string& text) {
    const auto line = nlohmann::json::parse(text);
    return line["level"] == "info" && line["component"] == "io" && line["message"] == "a \"b\"\n" &&
           line["depth"] == 64 && line["direct"] == true && line["engine"] == "uring" &&
           line["time"].get<double>() > 1e9;
  });
  EXPECT_EXIT(
      {
        log::info("io", "a \"b\"\n", {{"depth", 64}, {"direct", true}, {"engine", "uring"}});
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), is_json);
  ::unsetenv("PAGODA_LOG_FORMAT");
  ::unsetenv("PAGODA_LOG");
}

}  // namespace
}  // namespace pagoda

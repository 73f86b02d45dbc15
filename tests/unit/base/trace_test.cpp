// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/trace.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

using nlohmann::json;

/// The recorded events named `name`.
std::vector<json> events(const json& trace, const std::string& name) {
  std::vector<json> found;
  for (const json& event : trace["traceEvents"]) {
    if (event["name"] == name) found.push_back(event);
  }
  return found;
}

TEST(Trace, RecordsNothingUntilStarted) {
  trace::stop();
  bool evaluated = false;
  { PAGODA_TRACE("test", "unseen", {"x", (evaluated = true, 1)}); }
  EXPECT_FALSE(evaluated) << "arguments cost nothing while recording is off";
  EXPECT_TRUE(events(json::parse(trace::to_json()), "unseen").empty());
}

TEST(Trace, ScopesNestAndCarryArguments) {
  trace::start();
  const std::string page = "model.\"embed\"";
  {
    PAGODA_TRACE("pager", "outer", {"bytes", 4096}, {"page", page});
    { PAGODA_TRACE("pager", "inner"); }
  }
  trace::stop();
  const json file = json::parse(trace::to_json());
  const json outer = events(file, "outer").at(0);
  const json inner = events(file, "inner").at(0);
  EXPECT_EQ(outer["ph"], "X");
  EXPECT_EQ(outer["cat"], "pager");
  EXPECT_EQ(outer["args"]["bytes"], 4096);
  EXPECT_EQ(outer["args"]["page"], page);
  EXPECT_EQ(outer["tid"], inner["tid"]);
  EXPECT_LE(outer["ts"].get<double>(), inner["ts"].get<double>());
  EXPECT_GE(outer["ts"].get<double>() + outer["dur"].get<double>(),
            inner["ts"].get<double>() + inner["dur"].get<double>());
}

TEST(Trace, ThreadsAndNamedTracksAreTold) {
  trace::start();
  std::thread([] {
    trace::name_thread("worker/0");
    PAGODA_TRACE("test", "on worker");
  }).join();
  trace::slice("copy", "h2d", 1000, 3000, {}, "copy stream");
  trace::slice("copy", "h2d", 4000, 5000, {}, "copy stream");
  trace::instant("test", "moment");
  trace::stop();
  const json file = json::parse(trace::to_json());
  std::map<int, std::string> names;
  for (const json& event : events(file, "thread_name")) names[event["tid"]] = event["args"]["name"];
  EXPECT_EQ(names[events(file, "on worker").at(0)["tid"]], "worker/0") << "its thread has ended";
  const auto copies = events(file, "h2d");
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_EQ(names[copies[0]["tid"]], "copy stream");
  EXPECT_EQ(copies[0]["tid"], copies[1]["tid"]);
  EXPECT_EQ(copies[0]["dur"], 2.0);
  EXPECT_EQ(events(file, "moment").at(0)["ph"], "i");
}

TEST(Trace, ANewRecordingDropsTheOld) {
  trace::start();
  trace::instant("test", "first");
  trace::start();
  trace::instant("test", "second");
  trace::stop();
  trace::instant("test", "late");
  const json file = json::parse(trace::to_json());
  EXPECT_EQ(events(file, "first").size(), 0U);
  EXPECT_EQ(events(file, "second").size(), 1U);
  EXPECT_EQ(events(file, "late").size(), 0U);
}

TEST(Trace, IsBoundedAndSaysWhatItDropped) {
  trace::start(10);
  for (int i = 0; i < 25; ++i) trace::instant("test", "many");
  trace::stop();
  const json file = json::parse(trace::to_json());
  EXPECT_EQ(events(file, "many").size(), 10U);
  EXPECT_EQ(file["otherData"]["dropped_events"], 15);
}

TEST(Trace, RecordsFromManyThreadsAtOnce) {
  trace::start();
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([] {
        for (int i = 0; i < 500; ++i) {
          PAGODA_TRACE("test", "busy");
        }
      });
    }
    EXPECT_TRUE(json::accept(trace::to_json())) << "readable while it is being written";
  }
  trace::stop();
  EXPECT_EQ(events(json::parse(trace::to_json()), "busy").size(), 2000U);
}

TEST(Trace, WritesAFileOrSaysWhyNot) {
  trace::start();
  trace::instant("test", "kept");
  trace::stop();
  const auto path = std::filesystem::path(::testing::TempDir()) / "pagoda_trace_test.json";
  trace::write(path);
  std::ifstream in(path);
  EXPECT_EQ(events(json::parse(in), "kept").size(), 1U);
  std::filesystem::remove(path);
  try {
    trace::write("/no/such/directory/trace.json");
    FAIL();
  } catch (const EngineError& e) {
    EXPECT_THAT(e.what(), ::testing::AllOf(::testing::HasSubstr("path=/no/such/directory/"),
                                           ::testing::HasSubstr("No such file")));
  }
}

/// A folder with a file in it, which go with the test.
class TracePath : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    std::ofstream(file()) << "before";
    trace::start();
    trace::instant("test", "kept");
    trace::stop();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path in_folder(const char* name) const {
    return std::filesystem::path(folder_) / name;
  }
  std::filesystem::path file() const { return in_folder("file"); }
  static bool has_trace(const std::filesystem::path& path) {
    std::ifstream in(path);
    return events(json::parse(in), "kept").size() == 1;
  }
  std::size_t entries() const {
    const std::filesystem::directory_iterator all(folder_);
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
  }

 private:
  std::string folder_ = ::testing::TempDir() + "/pagoda_trace_XXXXXX";
};

TEST_F(TracePath, LinksAreFollowed) {
  std::filesystem::create_symlink("file", in_folder("link"));
  std::filesystem::create_symlink(in_folder("link"), in_folder("link_to_link"));
  std::filesystem::create_symlink("fresh", in_folder("dangling"));
  std::filesystem::create_symlink("round", in_folder("round"));
  trace::write(in_folder("link_to_link"));
  trace::write(in_folder("dangling"));
  EXPECT_THROW(trace::write(in_folder("round")), EngineError);
  for (const char* link : {"link", "link_to_link", "dangling", "round"}) {
    EXPECT_TRUE(std::filesystem::is_symlink(in_folder(link))) << link;
  }
  EXPECT_TRUE(has_trace(file()));
  EXPECT_TRUE(has_trace(in_folder("fresh")));
  EXPECT_EQ(entries(), 6U);
}

TEST_F(TracePath, ACharacterDeviceIsWrittenTo) {
  const auto path = in_folder("null");
  if (::mknod(path.c_str(), S_IFCHR | 0600, makedev(1, 3)) != 0) {
    GTEST_SKIP() << "needs the right to make device nodes: mknod(2) failed";
  }
  trace::write(path);
  EXPECT_TRUE(std::filesystem::is_character_file(path));
  EXPECT_EQ(entries(), 2U);
}

TEST_F(TracePath, PipesAndFoldersAreRefused) {
  ASSERT_EQ(::mkfifo(in_folder("fifo").c_str(), 0600), 0);
  std::filesystem::create_directory(in_folder("folder"));
  for (const char* name : {"fifo", "folder"}) {
    try {
      trace::write(in_folder(name));
      FAIL() << name;
    } catch (const EngineError& e) {
      EXPECT_THAT(e.what(), ::testing::HasSubstr("cannot write the trace file")) << name;
    }
  }
  EXPECT_TRUE(std::filesystem::is_fifo(in_folder("fifo")));
  EXPECT_EQ(entries(), 3U) << "nothing is left beside them";
}

}  // namespace
}  // namespace pagoda

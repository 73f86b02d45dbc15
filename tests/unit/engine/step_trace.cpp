// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/step_trace.h"

#include <fstream>
#include <iterator>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "unit/engine/rehearsal.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::engine {
namespace {

TEST(StepRange, IsAStepOrTwoWithADash) {
  EXPECT_EQ(parse_step_range("7"), std::pair(std::uint64_t{7}, std::uint64_t{7}));
  EXPECT_EQ(parse_step_range("3-15"), std::pair(std::uint64_t{3}, std::uint64_t{15}));
  for (const char* wrong : {"", "0", "-", "3-", "-3", "5-3", "a", "1-2-3", "2 - 3"}) {
    EXPECT_THROW((void)parse_step_range(wrong), UserError) << wrong;
  }
}

std::size_t occurrences(const std::string& text, const std::string& word) {
  std::size_t count = 0;
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    ++count;
  }
  return count;
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

Rehearsal short_training(const std::filesystem::path& trace) {
  Rehearsal r;
  r.config.device = "cpu";
  r.config.device_budget = 1_MiB;
  r.config.gradient_staging = 100_KiB;
  r.config.parameters = Placement::Host;
  r.config.trace = trace.string();
  r.steps = 5;
  return r;
}

TEST(StepTrace, HasTheStepsThatWereChosen) {
  const io::ScratchDirectory directory;
  Rehearsal r = short_training(directory.path() / "trace.json");
  r.config.trace_steps = "2-3";
  rehearse(r);
  const std::string text = contents(directory.path() / "trace.json");
  EXPECT_EQ(occurrences(text, R"("name":"step")"), 2U);
  EXPECT_GT(occurrences(text, R"("name":"update")"), 0U);
}

TEST(StepTrace, IsWrittenForWhatThereIsWhenTrainingEndsEarlier) {
  const io::ScratchDirectory directory;
  Rehearsal r = short_training(directory.path() / "trace.json");
  r.config.trace_steps = "4-9";
  rehearse(r);
  EXPECT_EQ(occurrences(contents(directory.path() / "trace.json"), R"("name":"step")"), 2U);
}

TEST(StepTrace, ThatCannotBeWrittenIsRefusedBeforeTheTraining) {
  const io::ScratchDirectory directory;
  EXPECT_THROW(rehearse(short_training(directory.path() / "absent" / "trace.json")), UserError);
}

TEST(StepTrace, ThatCannotBeWrittenLaterDoesNotEndTheTraining) {
  const io::ScratchDirectory directory;
  const auto gone = directory.path() / "gone";
  std::filesystem::create_directory(gone);
  {
    StepTrace trace(gone / "trace.json", "1", 0, 1);
    trace.stepped(0);
    std::filesystem::remove_all(gone);
    trace.stepped(1);
  }
  EXPECT_FALSE(std::filesystem::exists(gone));
}

TEST(StepTrace, IsOneFileForEachRank) {
  const io::ScratchDirectory directory;
  const std::string path = (directory.path() / "trace.json").string();
  {
    StepTrace first(path, "1", 0, 2);
    first.stepped(0);
    first.stepped(1);
    StepTrace second(path, "1", 1, 2);
    second.stepped(0);
  }
  EXPECT_TRUE(std::filesystem::exists(directory.path() / "trace.rank0.json"));
  EXPECT_TRUE(std::filesystem::exists(directory.path() / "trace.rank1.json"));
}

}  // namespace
}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, and what the others see when one of them dies or freezes.
#include <array>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/gloo_world.h"
#include "torch/process.h"

namespace pagoda::torch {
namespace {

using ::testing::HasSubstr;
using zoo::free_port;
using zoo::Process;

struct Loss {
  std::string name;
  int victim;  // rank 0 holds the store
  int signal;
};

class GlooProcesses : public ::testing::TestWithParam<Loss> {
 protected:
  void start(const std::map<std::string, std::string>& more = {}) {
    std::map<std::string, std::string> environment{{"WORLD_SIZE", "2"},
                                                   {"MASTER_ADDR", "127.0.0.1"},
                                                   {"MASTER_PORT", std::to_string(free_port())},
                                                   {"VICTIM", std::to_string(GetParam().victim)}};
    environment.insert(more.begin(), more.end());
    std::array<std::unique_ptr<Process>, 2> ranks;
    for (int r = 0; r < 2; ++r) {
      environment["RANK"] = std::to_string(r);
      ranks[static_cast<std::size_t>(r)] =
          std::make_unique<Process>(std::vector<std::string>{PAGODA_LOST_PEER}, environment);
    }
    const auto victim = static_cast<std::size_t>(GetParam().victim);
    victim_ = std::move(ranks[victim]);
    survivor_ = std::move(ranks[1 - victim]);
    ASSERT_EQ(victim_->line(), "ready");
    ASSERT_EQ(survivor_->line(), "ready");
  }

  /// What the survivor says each of its calls ended with.
  std::map<std::string, std::string> read_ends() {
    std::map<std::string, std::string> ends;
    for (std::string line = survivor_->line(); line != "end"; line = survivor_->line()) {
      if (line.empty()) {
        ADD_FAILURE() << "the survivor died: " << survivor_->wait();
        return ends;
      }
      const auto colon = line.find(": ");
      ends[line.substr(0, colon)] = line.substr(colon + 1);
    }
    EXPECT_EQ(survivor_->wait(), 0);
    return ends;
  }

  std::unique_ptr<Process> victim_;
  std::unique_ptr<Process> survivor_;
};

TEST_P(GlooProcesses, TheSurvivorEndsWithAnErrorThatNamesTheLostRank) {
  const Loss& loss = GetParam();
  ASSERT_NO_FATAL_FAILURE(start());
  ::usleep(50'000);  // most likely it is blocked by now; it must end as well if it is not
  victim_->signal(loss.signal);
  std::map<std::string, std::string> ends = read_ends();
  const std::string name = "rank " + std::to_string(loss.victim);
  EXPECT_THAT(ends["barrier"], HasSubstr(name));
  EXPECT_THAT(ends["pull"], HasSubstr(name));
  if (loss.signal == SIGSTOP) {  // nothing was closed: only the watch can tell
    EXPECT_THAT(ends["watch"], HasSubstr(name));
  }
}

TEST_P(GlooProcesses, AWriteToARankThatIsGoneDoesNotEndTheProcess) {
  if (GetParam().signal != SIGKILL) return;  // a frozen rank's kernel takes what is written
  ASSERT_NO_FATAL_FAILURE(start({{"UNNOTICED", "1"}}));
  victim_->signal(SIGKILL);
  victim_->wait();
  const std::map<std::string, std::string> ends = read_ends();
  EXPECT_EQ(ends.size(), 4u);
  for (const auto& [call, end] : ends) {
    EXPECT_THAT(end, HasSubstr("rank " + std::to_string(GetParam().victim))) << call;
  }
}

INSTANTIATE_TEST_SUITE_P(Losses, GlooProcesses,
                         ::testing::Values(Loss{"killed", 1, SIGKILL}, Loss{"frozen", 1, SIGSTOP},
                                           Loss{"holder_of_the_store_killed", 0, SIGKILL},
                                           Loss{"holder_of_the_store_frozen", 0, SIGSTOP}),
                         [](const auto& info) { return info.param.name; });

/// Sets the four variables for a test, and puts them back.
class WorldFromEnv : public ::testing::Test {
 protected:
  static constexpr const char* kNames[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};

  void set(const char* rank, const char* size, const char* address, const char* port) {
    const char* values[] = {rank, size, address, port};
    for (int i = 0; i < 4; ++i) {
      values[i] == nullptr ? ::unsetenv(kNames[i]) : ::setenv(kNames[i], values[i], 1);
    }
  }

  void TearDown() override { set(nullptr, nullptr, nullptr, nullptr); }

  static std::string error() {
    try {
      world_from_env();
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }
};

TEST_F(WorldFromEnv, NothingSetIsAlone) {
  set(nullptr, nullptr, nullptr, nullptr);
  EXPECT_EQ(world_from_env()->size(), 1);
  set("0", "1", "127.0.0.1", "29500");
  EXPECT_EQ(world_from_env()->size(), 1);
}

TEST_F(WorldFromEnv, NamesWhatIsMissingOrMakesNoSense) {
  set(nullptr, "2", "127.0.0.1", "29500");
  EXPECT_THAT(error(), HasSubstr("not RANK"));
  set("0", nullptr, "127.0.0.1", "29500");
  EXPECT_THAT(error(), HasSubstr("not WORLD_SIZE"));
  set("0", "2", nullptr, "29500");
  EXPECT_THAT(error(), HasSubstr("not MASTER_ADDR"));
  set("0", "2", "127.0.0.1", "");
  EXPECT_THAT(error(), HasSubstr("not MASTER_PORT"));
  set("2", "2", "127.0.0.1", "29500");
  EXPECT_THAT(error(), HasSubstr("RANK must be an integer from 0 to 1, not '2'"));
  set("0", "two", "127.0.0.1", "29500");
  EXPECT_THAT(error(), HasSubstr("WORLD_SIZE must be"));
  set("0", "2", "127.0.0.1", "65536");
  EXPECT_THAT(error(), HasSubstr("MASTER_PORT must be"));
}

}  // namespace
}  // namespace pagoda::torch

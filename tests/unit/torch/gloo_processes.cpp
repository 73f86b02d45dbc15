// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, and what the others see when one of them dies or freezes.
#include <csignal>
#include <cstdlib>
#include <map>
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

class GlooProcesses : public ::testing::TestWithParam<Loss> {};

TEST_P(GlooProcesses, TheSurvivorEndsWithAnErrorThatNamesTheLostRank) {
  const Loss& loss = GetParam();
  std::map<std::string, std::string> environment{{"WORLD_SIZE", "2"},
                                                 {"MASTER_ADDR", "127.0.0.1"},
                                                 {"MASTER_PORT", std::to_string(free_port())},
                                                 {"VICTIM", std::to_string(loss.victim)}};
  environment["RANK"] = "0";
  Process zero({PAGODA_LOST_PEER}, environment);
  environment["RANK"] = "1";
  Process one({PAGODA_LOST_PEER}, environment);
  Process& victim = loss.victim == 0 ? zero : one;
  Process& survivor = loss.victim == 0 ? one : zero;
  ASSERT_EQ(victim.line(), "ready");
  ASSERT_EQ(survivor.line(), "ready");
  ::usleep(50'000);  // most likely it is blocked by now; it must end as well if it is not
  victim.signal(loss.signal);

  std::map<std::string, std::string> ends;
  for (std::string line = survivor.line(); line != "end"; line = survivor.line()) {
    ASSERT_NE(line, "") << "the survivor died";
    const auto colon = line.find(": ");
    ends[line.substr(0, colon)] = line.substr(colon + 1);
  }
  EXPECT_EQ(survivor.wait(), 0);
  const std::string name = "rank " + std::to_string(loss.victim);
  EXPECT_THAT(ends["barrier"], HasSubstr(name));
  EXPECT_THAT(ends["pull"], HasSubstr(name));
  if (loss.signal == SIGSTOP) {  // nothing was closed: only the watch can tell
    EXPECT_THAT(ends["watch"], HasSubstr(name));
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
  EXPECT_THAT(error(), HasSubstr("RANK must be a whole number from 0 to 1, not '2'"));
  set("0", "two", "127.0.0.1", "29500");
  EXPECT_THAT(error(), HasSubstr("WORLD_SIZE must be"));
  set("0", "2", "127.0.0.1", "65536");
  EXPECT_THAT(error(), HasSubstr("MASTER_PORT must be"));
}

}  // namespace
}  // namespace pagoda::torch

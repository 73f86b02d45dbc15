// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, and what the others see when one of them dies or freezes.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/gloo_world.h"

namespace pagoda::torch {
namespace {

using ::testing::HasSubstr;

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  PAGODA_CHECK_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  PAGODA_CHECK_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

/// A program that is running, and what it prints. Killed when this goes.
class Process {
 public:
  Process(const std::string& program, const std::map<std::string, std::string>& environment) {
    int ends[2];
    PAGODA_CHECK_EQ(::pipe(ends), 0);
    std::vector<std::string> texts;
    for (const auto& [name, value] : environment) texts.push_back(name + "=" + value);
    std::vector<char*> entries;
    for (std::string& text : texts) entries.push_back(text.data());
    entries.push_back(nullptr);
    char* arguments[] = {const_cast<char*>(program.c_str()), nullptr};
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::close(ends[0]);
      ::close(ends[1]);
      ::execve(program.c_str(), arguments, entries.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    output_ = ::fdopen(ends[0], "r");
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (pid_ > 0) {
      signal(SIGKILL);
      wait();
    }
    std::fclose(output_);
  }

  void signal(int number) { ::kill(pid_, number); }

  /// The next line, or "" at the end.
  std::string line() {
    std::string text;
    for (int c = std::fgetc(output_); c != EOF && c != '\n'; c = std::fgetc(output_)) {
      text.push_back(static_cast<char>(c));
    }
    return text;
  }

  /// Its exit status, or 128 and the signal.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  std::FILE* output_ = nullptr;
};

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
  if (const char* path = std::getenv("LD_LIBRARY_PATH")) environment["LD_LIBRARY_PATH"] = path;
  environment["RANK"] = "0";
  Process zero(PAGODA_LOST_PEER, environment);
  environment["RANK"] = "1";
  Process one(PAGODA_LOST_PEER, environment);
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

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/process_mark.h"

#include <csignal>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace pagoda {
namespace {

TEST(ProcessMark, TellsWhenAProcessHasEnded) {
  const std::string mine = process_mark();
  ASSERT_FALSE(mine.empty());
  EXPECT_FALSE(process_has_ended(mine));
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string mark = process_mark();
    if (::write(ends[1], mark.data(), mark.size()) < 0) ::_exit(1);
    while (true) ::pause();
  }
  char text[200];
  const ssize_t length = ::read(ends[0], text, sizeof(text));
  ASSERT_GT(length, 0);
  const std::string mark(text, static_cast<std::size_t>(length));
  EXPECT_NE(mark, mine);
  EXPECT_FALSE(process_has_ended(mark));
  ::kill(child, SIGSTOP);
  EXPECT_FALSE(process_has_ended(mark));
  ::kill(child, SIGKILL);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(process_has_ended(mark));  // nobody has asked for its status yet
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(process_has_ended(mark));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(ProcessMark, ANumberThatAnotherProcessHasNowIsNotTheSameProcess) {
  std::string mark = process_mark();
  mark.back() = mark.back() == '0' ? '1' : '0';  // started at another time
  EXPECT_TRUE(process_has_ended(mark));
}

TEST(ProcessMark, NothingIsSaidOfWhatCannotBeSeen) {
  EXPECT_FALSE(process_has_ended(""));
  EXPECT_FALSE(process_has_ended("another-machine/1 999999999 1"));
}

}  // namespace
}  // namespace pagoda

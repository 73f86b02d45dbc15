// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <cstdlib>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

namespace tiny_gpt {
namespace {

using testing::EndsWith;

const Status kStatus{.step = 12,
                     .steps = 200,
                     .loss = 2.34567,
                     .tokens_per_second = 1234.4,
                     .stall = 0.0123,
                     .device = 16_MiB,
                     .nvme = 1_GiB,
                     .seconds_left = 64.2};

TEST(StatusLine, SaysWhatIsKnown) {
  EXPECT_EQ(status_line(kStatus),
            "step 12/200  loss 2.3457  1234 tok/s  stall 1.2 %  device 16 MiB  nvme 1 GiB  "
            "1:05 left");
  EXPECT_EQ(status_line({.step = 3, .loss = 1}), "step 3  loss 1.0000  0 tok/s  0:00 left");
}

TEST(StatusLine, IsShortWhereThereIsLittleRoom) {
  EXPECT_EQ(short_status_line(kStatus),
            "step 12/200  loss 2.346  1234 tok/s  stall 1 %  dev 16M nvme 1024M  1:05");
  EXPECT_EQ(short_status_line({.step = 3, .loss = 1}), "step 3  loss 1.000  0 tok/s  0:00");
}

TEST(Fit, CutsByColumnsAndNeverInsideACharacter) {
  EXPECT_EQ(fit("hello", 5), "hello");
  EXPECT_EQ(fit("hello", 4), "hel…");
  EXPECT_EQ(fit("hello", 1), "…");
  EXPECT_EQ(fit("hello", 0), "");
  EXPECT_EQ(fit("äöü", 3), "äöü");
  EXPECT_EQ(fit("äöü", 2), "ä…");
}

std::string read_all(std::FILE* file) {
  std::rewind(file);
  std::string out(4096, '\0');
  out.resize(std::fread(out.data(), 1, out.size(), file));
  return out;
}

TEST(Progress, WritesPlainLinesWhereThereIsNoTerminal) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  {
    Progress progress(file, {.terminal_interval = 0, .plain_interval = 1e9});
    for (int step = 1; step <= 5; ++step) progress.show({.step = step});
  }
  // The first at once, the last at the end, nothing between: the interval is not over.
  const std::string text = read_all(file);
  EXPECT_EQ(text, status_line({.step = 1}) + "\n" + status_line({.step = 5}) + "\n");
  std::fclose(file);
}

TEST(Progress, WritesEveryLineWhenTheIntervalIsOver) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  Progress progress(file, {.terminal_interval = 0, .plain_interval = 0});
  for (int step = 1; step <= 3; ++step) progress.show({.step = step});
  progress.finish();
  progress.finish();
  EXPECT_THAT(read_all(file), EndsWith(status_line({.step = 3}) + "\n"));
  std::fclose(file);
}

TEST(Progress, OneLivingLineOnATerminal) {
  const int master = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(master, 0);
  ASSERT_EQ(grantpt(master), 0);
  ASSERT_EQ(unlockpt(master), 0);
  const int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
  ASSERT_GE(slave, 0);
  winsize size{};
  size.ws_col = 30;
  ASSERT_EQ(ioctl(master, TIOCSWINSZ, &size), 0);
  termios mode{};
  ASSERT_EQ(tcgetattr(slave, &mode), 0);
  cfmakeraw(&mode);
  ASSERT_EQ(tcsetattr(slave, TCSANOW, &mode), 0);
  std::FILE* file = fdopen(slave, "w");
  {
    Progress progress(file, {.terminal_interval = 0, .plain_interval = 0});
    progress.show(kStatus);
    size.ws_col = 20;  // the window is made smaller
    ASSERT_EQ(ioctl(master, TIOCSWINSZ, &size), 0);
    progress.show(kStatus);
  }
  const std::string line = short_status_line(kStatus);
  const std::string expected =
      "\x1b[?25l\r" + fit(line, 29) + "\x1b[K\r" + fit(line, 19) + "\x1b[K\n\x1b[?25h";
  std::string text;
  std::string piece(4096, '\0');
  while (text.size() < expected.size()) {  // it comes in pieces
    const ssize_t count = read(master, piece.data(), piece.size());
    ASSERT_GT(count, 0);
    text += piece.substr(0, static_cast<std::size_t>(count));
  }
  EXPECT_EQ(text, expected);
  std::fclose(file);
  close(master);
}

}  // namespace
}  // namespace tiny_gpt

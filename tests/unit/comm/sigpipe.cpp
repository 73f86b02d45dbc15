// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/sigpipe.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

namespace pagoda::comm {
namespace {

std::atomic<int> caught = 0;

/// A pipe that nobody reads, and a handler that counts.
class NoSigpipeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    caught = 0;
    struct sigaction count {};
    count.sa_handler = [](int) { ++caught; };
    ASSERT_EQ(::sigaction(SIGPIPE, &count, &before_), 0);
    ASSERT_EQ(::pipe(ends_.data()), 0);
    ::close(ends_[0]);
  }
  void TearDown() override {
    ::close(ends_[1]);
    ::sigaction(SIGPIPE, &before_, nullptr);
  }

  int error_of_write() {
    errno = 0;
    return ::write(ends_[1], "x", 1) < 0 ? errno : 0;
  }

  std::array<int, 2> ends_{};
  struct sigaction before_ {};
};

TEST_F(NoSigpipeTest, AWriteFailsAndThatIsAll) {
  {
    const NoSigpipe scope;
    EXPECT_EQ(error_of_write(), EPIPE);
    EXPECT_EQ(error_of_write(), EPIPE);
  }
  EXPECT_EQ(caught, 0);
  EXPECT_EQ(error_of_write(), EPIPE);
  EXPECT_EQ(caught, 1) << "outside, the process has its own way again";
}

TEST_F(NoSigpipeTest, ScopesNestAndKeepErrno) {
  {
    const NoSigpipe outer;
    {
      const NoSigpipe inner;
      EXPECT_EQ(error_of_write(), EPIPE);
    }
    EXPECT_EQ(errno, EPIPE);
    EXPECT_EQ(error_of_write(), EPIPE);
  }
  EXPECT_EQ(caught, 0);
}

TEST_F(NoSigpipeTest, ThreadsStartedInsideAreSpared) {
  std::thread thread;
  std::atomic<bool> outside = false;
  {
    const NoSigpipe scope;
    thread = std::thread([&] {
      while (!outside) std::this_thread::yield();
      EXPECT_EQ(error_of_write(), EPIPE);
    });
  }
  outside = true;
  thread.join();
  EXPECT_EQ(caught, 0);
}

TEST_F(NoSigpipeTest, OneThatWasHeldBackBeforeIsLeftToItsOwner) {
  sigset_t set;
  sigset_t before;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &set, &before);
  EXPECT_EQ(error_of_write(), EPIPE);
  {
    const NoSigpipe scope;
    EXPECT_EQ(error_of_write(), EPIPE);
  }
  EXPECT_EQ(caught, 0);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(caught, 1);
}

}  // namespace
}  // namespace pagoda::comm

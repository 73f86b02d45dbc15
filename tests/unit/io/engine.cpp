// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/engine.h"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/log.h"
#include "pagoda/io/io_error.h"
#include "pagoda/io/request_queue.h"
#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

/// A request that can be waited for.
class Probe final : public Request {
 public:
  void complete(std::int64_t result) noexcept override {
    answer_ = result;
    thread_ = std::this_thread::get_id();
    done_.store(true, std::memory_order_release);
    done_.notify_all();
  }
  std::int64_t wait() {
    done_.wait(false, std::memory_order_acquire);
    return answer_;
  }
  std::thread::id thread() const { return thread_; }

 private:
  std::atomic<bool> done_{false};
  std::int64_t answer_ = 0;
  std::thread::id thread_;
};

class EngineTest : public ::testing::TestWithParam<EngineChoice> {
 protected:
  void SetUp() override {
    if (GetParam() == EngineChoice::Uring && !uring_allowed()) GTEST_SKIP() << "refused here";
  }
  static void submit(Engine& engine, Request& request) {
    RequestList list;
    list.push(request);
    engine.submit(list);
  }

  const ScratchDirectory scratch_;
  const SwapFile file_{scratch_.path(), 1_MiB, {}};
  AlignedBuffer memory_{1_MiB};
};

TEST_P(EngineTest, MovesBytesAndReportsWhatTheKernelSays) {
  const auto engine = make_engine(GetParam(), {.files = {file_.fd()}, .depth = 4});
  std::memset(memory_.data(), 7, 8192);
  Probe write;
  write.op = Op::Write;
  write.data = memory_.data();
  write.offset = 4096;
  write.length = 8192;
  submit(*engine, write);
  EXPECT_EQ(write.wait(), 8192);

  std::memset(memory_.data(), 0, 8192);
  Probe read;
  read.data = memory_.data();
  read.offset = 8192;
  read.length = 4096;
  submit(*engine, read);
  EXPECT_EQ(read.wait(), 4096);
  EXPECT_EQ(memory_.data()[4095], std::byte{7});
  EXPECT_NE(read.thread(), std::this_thread::get_id());

  Probe beyond;
  beyond.data = memory_.data();
  beyond.offset = 2_MiB;
  beyond.length = 4096;
  submit(*engine, beyond);
  EXPECT_EQ(beyond.wait(), 0) << "the end of the file is a short read, for the caller to judge";

  Probe stray;
  stray.file = 3;
  stray.data = memory_.data();
  stray.length = 4096;
  submit(*engine, stray);
  EXPECT_EQ(stray.wait(), -EBADF);

  Probe nothing;
  nothing.op = Op::Nothing;
  submit(*engine, nothing);
  EXPECT_EQ(nothing.wait(), 0);
}

TEST_P(EngineTest, ManyMoreRequestsThanDepth) {
  std::vector<Probe> probes(1000);
  AlignedBuffer memory(probes.size() * 4096);  // a page each: requests are unordered
  {
    const auto engine = make_engine(GetParam(), {.files = {file_.fd()}, .depth = 3});
    engine->add_buffer(memory.span());
    RequestList list;
    for (std::size_t i = 0; i < probes.size(); ++i) {
      probes[i].data = memory.data() + i * 4096;
      probes[i].offset = i % 256 * 4096;
      probes[i].length = 4096;
      probes[i].priority = static_cast<Priority>(i % 3);
      list.push(probes[i]);
    }
    engine->submit(list);
  }  // completes them all
  for (Probe& probe : probes) EXPECT_EQ(probe.wait(), 4096);
}

TEST_P(EngineTest, ManyBuffersCanBeRegisteredAndUnregistered) {
  const auto engine = make_engine(GetParam(), {.files = {file_.fd()}});
  const bool expected = GetParam() == EngineChoice::Uring;
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < 200; ++i) {
      EXPECT_EQ(engine->add_buffer(memory_.span().subspan(i * 4096, 4096)), expected);
    }
    for (std::size_t i = 0; i < 200; ++i) {
      engine->remove_buffer(memory_.span().subspan(i * 4096, 4096));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Choices, EngineTest,
                         ::testing::Values(EngineChoice::Uring, EngineChoice::Posix),
                         [](const auto& info) {
                           return info.param == EngineChoice::Uring ? "uring" : "posix";
                         });

TEST(Engine, TheChoiceIsLogged) {
  const ScratchDirectory scratch;
  const SwapFile file(scratch.path(), 4096, {});
  std::string lines;
  {
    const log::Capture capture([&](log::Level, const std::string& line) { lines += line + "\n"; });
    make_engine(EngineChoice::Posix, {.files = {file.fd()}});
  }
  EXPECT_NE(lines.find("engine=posix"), std::string::npos) << lines;
}

/// Makes io_uring_setup fail for this process from now on, as containers do.
bool refuse_uring() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{4, program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(Engine, WhereUringIsRefusedPosixServes) {
  const ScratchDirectory scratch;
  const SwapFile file(scratch.path(), 4096, {});
  const pid_t child = ::fork();
  if (child == 0) {
    if (!refuse_uring()) ::_exit(77);
    std::string lines;
    const log::Capture capture([&](log::Level, const std::string& line) { lines += line; });
    if (make_engine(EngineChoice::Auto, {.files = {file.fd()}})->name() != "posix") ::_exit(1);
    if (lines.find("EPERM") == std::string::npos) ::_exit(2);
    try {
      make_engine(EngineChoice::Uring, {.files = {file.fd()}});
      ::_exit(3);
    } catch (const EngineError& error) {
      if (std::string(error.what()).find("EPERM") == std::string::npos) ::_exit(4);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no seccomp filters here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Engine, NamesAreRead) {
  EXPECT_EQ(parse_engine("auto"), EngineChoice::Auto);
  EXPECT_EQ(parse_engine("uring"), EngineChoice::Uring);
  EXPECT_EQ(parse_engine("posix"), EngineChoice::Posix);
  EXPECT_THROW(parse_engine("libaio"), UserError);
}

TEST(RequestQueue, UrgentFirstThenInOrder) {
  RequestQueue queue;
  std::vector<Probe> probes(4);
  probes[0].priority = Priority::Background;
  probes[3].priority = Priority::Urgent;
  for (Probe& probe : probes) queue.push(probe);
  for (const std::size_t expected : {3U, 1U, 2U, 0U}) EXPECT_EQ(queue.pop(), &probes[expected]);
  EXPECT_EQ(queue.pop(), nullptr);
  EXPECT_TRUE(queue.empty());
}

TEST(RequestQueue, ReadsAndWritesInTurns) {
  RequestQueue queue;
  std::vector<Probe> probes(6);
  for (const std::size_t write : {0U, 1U, 5U}) probes[write].op = Op::Write;
  probes[5].priority = Priority::Urgent;
  for (Probe& probe : probes) queue.push(probe);
  for (const std::size_t expected : {5U, 2U, 0U, 3U, 1U, 4U}) {
    EXPECT_EQ(queue.pop(), &probes[expected]);
  }
  EXPECT_EQ(queue.pop(), nullptr);
}

TEST(RequestQueue, TurnsAreThoseOfEachPriority) {
  RequestQueue queue;
  std::vector<Probe> probes(6);
  for (const std::size_t write : {0U, 1U}) probes[write].op = Op::Write;
  for (const std::size_t urgent : {4U, 5U}) probes[urgent].priority = Priority::Urgent;
  for (std::size_t i = 0; i < 4; ++i) queue.push(probes[i]);
  // An urgent read before each: the others' reads have their turns all the same.
  for (const std::size_t expected : {2U, 0U}) {
    queue.push(probes[expected == 2U ? 4U : 5U]);
    EXPECT_EQ(queue.pop(), &probes[expected == 2U ? 4U : 5U]);
    EXPECT_EQ(queue.pop(), &probes[expected]);
  }
}

}  // namespace
}  // namespace pagoda::io

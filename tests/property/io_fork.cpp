// SPDX-License-Identifier: Apache-2.0
// A fork in the middle of transfers (a DataLoader's worker) harms neither side: the child cannot
// use the space, and can drop it without hanging or disturbing the parent.
#include <cstring>
#include <memory>

#include <gtest/gtest.h>
#include <sys/wait.h>

#include "pagoda/base/aligned_buffer.h"
#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

class IoFork : public ::testing::TestWithParam<SpaceKind> {
 protected:
  void SetUp() override { PAGODA_SKIP_WITHOUT_ENGINE(GetParam()); }
};

/// What the child does; its exit code says where it went wrong.
int child_part(std::unique_ptr<SwapSpace> space, Extent extent, RegisteredBuffer registered,
               std::vector<Transfer> transfers, AlignedBuffer& memory) {
  ::alarm(20);  // a hang is a failure
  try {
    static_cast<void>(space->write(extent, 0, memory.span()));
    return 1;
  } catch (const EngineError&) {
  }
  try {
    static_cast<void>(space->allocate(1));
    return 2;
  } catch (const EngineError&) {
  }
  try {
    transfers.back().wait();
    return 3;
  } catch (const EngineError&) {
  }
  transfers.clear();
  extent = Extent();
  registered = RegisteredBuffer();
  space.reset();
  return 0;
}

TEST_P(IoFork, TheChildMayOnlyForget) {
  const ScratchDirectory scratch;
  Budget budget("nvme", 64_MiB);
  auto space = std::make_unique<SwapSpace>(GetParam().options(scratch, 32_MiB), budget);
  constexpr Bytes kLength = 8_MiB;
  Extent extent = space->allocate(kLength);
  AlignedBuffer out(kLength, 4096, AlignedBuffer::Pages::Huge);
  const auto bytes = random_bytes(kLength, 4);
  std::memcpy(out.data(), bytes.data(), kLength);
  RegisteredBuffer registered = space->register_buffer(out.span());
  for (int round = 0; round < 3; ++round) {
    std::vector<Transfer> transfers;
    for (Bytes at = 0; at < kLength; at += 1_MiB) {
      transfers.push_back(space->write(extent, at, out.span().subspan(at, 1_MiB)));
    }
    const pid_t child = ::fork();
    if (child == 0) {
      ::_exit(child_part(std::move(space), std::move(extent), std::move(registered),
                         std::move(transfers), out));
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
    for (Transfer& transfer : transfers) transfer.wait();
    std::vector<std::byte> read(kLength);
    space->read(extent, 0, read).wait();
    EXPECT_TRUE(read == bytes);
  }
  EXPECT_EQ(space->stats().errors, 0U);
}

INSTANTIATE_TEST_SUITE_P(Kinds, IoFork,
                         ::testing::Values(SpaceKind{EngineChoice::Uring, Direct::Auto, true, 2},
                                           SpaceKind{EngineChoice::Posix, Direct::Auto, true, 2}),
                         space_kind_name);

}  // namespace
}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/swap_file.h"

#include <fstream>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pagoda/base/error.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::io {
namespace {

using ::testing::HasSubstr;

std::string refusal(const std::filesystem::path& directory) {
  try {
    const SwapFile file(directory, 4096, {});
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(SwapFile, ADirectoryThatIsNoneIsTheUsersError) {
  const ScratchDirectory scratch;
  EXPECT_THAT(refusal(scratch.path() / "missing"), HasSubstr("missing' does not exist"));
  std::ofstream(scratch.path() / "file") << "x";
  EXPECT_THAT(refusal(scratch.path() / "file"), HasSubstr("file' is not a directory"));
}

TEST(SwapFile, ADirectoryThatCannotBeWrittenToIsTheUsersError) {
  EXPECT_THAT(refusal("/proc/self"), HasSubstr("nvme directory '/proc/self' cannot be used"));
}

TEST(SwapFile, AFileLargerThanTheLimitNamesIt) {
  const ScratchDirectory scratch;
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit lower { 1_MiB, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &lower), 0);
  std::string said;
  EXPECT_EQ(file_size_limit(), 1_MiB);
  try {
    const SwapFile file(scratch.path(), 2_MiB, {});
  } catch (const UserError& error) {
    said = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(said, HasSubstr("RLIMIT_FSIZE (ulimit -f) allows, 1 MiB: raise the limit, lower"));
}

TEST(SwapFile, ZerosAreWrittenWhereAskedFor) {
  const ScratchDirectory scratch;
  for (const Direct direct : {Direct::Auto, Direct::Off}) {
    const SwapFile file(scratch.path(), 5_MiB, {direct, Preallocate::Zero});
    struct stat info {};
    ASSERT_EQ(::fstat(file.fd(), &info), 0);
    EXPECT_EQ(info.st_size, static_cast<off_t>(5_MiB));
    EXPECT_GE(static_cast<Bytes>(info.st_blocks) * 512, 5_MiB);
  }
}

/// An io_uring that has ended may hold its files for a while: that costs no space.
TEST(SwapFile, ItsSpaceIsFreeWhenItIsGoneWhoeverHasItOpen) {
  const ScratchDirectory scratch;
  auto file = std::make_unique<SwapFile>(scratch.path(), 1_MiB,
                                         SwapFile::Options{Direct::Auto, Preallocate::Zero});
  const int other = ::dup(file->fd());
  struct stat info {};
  const pid_t child = ::fork();
  if (child == 0) {
    file.reset();  // not its own
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ASSERT_EQ(::fstat(other, &info), 0);
  EXPECT_GT(info.st_blocks, 0);
  file.reset();
  ASSERT_EQ(::fstat(other, &info), 0);
  EXPECT_EQ(info.st_blocks, 0);
  ::close(other);
}

TEST(SwapFile, CachedFilesNeedNoAlignment) {
  const ScratchDirectory scratch;
  const SwapFile file(scratch.path(), 4096, {.direct = Direct::Off});
  EXPECT_FALSE(file.direct());
  EXPECT_EQ(file.offset_alignment(), 1U);
  EXPECT_EQ(file.memory_alignment(), 1U);
  EXPECT_THAT(file.path(), HasSubstr(scratch.path().string() + "/#"));
}

}  // namespace
}  // namespace pagoda::io

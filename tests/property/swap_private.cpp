// SPDX-License-Identifier: Apache-2.0
// Swap files are private: mode 0600, without a name, and gone with their process, kill -9 included.
#include <csignal>
#include <filesystem>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include "pagoda/io/swap_space.h"
#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

std::size_t entries(const std::filesystem::path& directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), {}));
}

Bytes free_bytes(const std::filesystem::path& directory) {
  struct statvfs disk {};
  ::statvfs(directory.c_str(), &disk);
  return static_cast<Bytes>(disk.f_bfree) * disk.f_frsize;
}

TEST(SwapPrivate, FilesHaveNoNameAndAreTheOwnersAlone) {
  const ScratchDirectory scratch;
  const mode_t old = ::umask(0);
  const SwapFile file(scratch.path(), 1_MiB, {});
  ::umask(old);
  EXPECT_EQ(entries(scratch.path()), 0U);
  struct stat info {};
  ASSERT_EQ(::fstat(file.fd(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600U);
  EXPECT_EQ(info.st_nlink, 0U);
  EXPECT_EQ(info.st_uid, ::geteuid());
  EXPECT_EQ(info.st_size, static_cast<off_t>(1_MiB));
  EXPECT_GE(static_cast<Bytes>(info.st_blocks) * 512, 1_MiB) << "space is claimed, not promised";
  EXPECT_NE(::fcntl(file.fd(), F_GETFD) & FD_CLOEXEC, 0);
  // Nobody can give it a name, not through /proc either.
  const auto fd_path = "/proc/self/fd/" + std::to_string(file.fd());
  EXPECT_NE(::linkat(AT_FDCWD, fd_path.c_str(), AT_FDCWD, (scratch.path() / "mine").c_str(),
                     AT_SYMLINK_FOLLOW),
            0);
}

TEST(SwapPrivate, GoneAfterKill) {
  constexpr Bytes kSize = 1_GiB;
  const ScratchDirectory scratch;
  if (free_bytes(scratch.path()) < 3 * kSize) GTEST_SKIP() << "less than 3 GiB free";
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    Budget budget("nvme", kSize);
    SwapOptions options;
    options.directories = {scratch.path()};
    options.capacity = kSize;
    SwapSpace space(options, budget);
    const Extent extent = space.allocate(16_MiB);
    const auto bytes = random_bytes(16_MiB, 1);
    space.write(extent, 0, bytes).wait();
    const char yes = entries(scratch.path()) == 0 ? 'y' : 'n';
    if (::write(ready[1], &yes, 1) != 1) ::_exit(1);
    while (true) space.write(extent, 0, bytes).wait();  // killed in mid-write
  }
  ::close(ready[1]);
  char answer = 0;
  ASSERT_EQ(::read(ready[0], &answer, 1), 1);
  ::close(ready[0]);
  EXPECT_EQ(answer, 'y') << "a name was there while in use";
  const Bytes in_use = free_bytes(scratch.path());
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(entries(scratch.path()), 0U);
  // Others use this disk too, so not to the byte; and file systems free in the background.
  bool freed = false;
  for (int i = 0; i < 300 && !freed; ++i) {
    freed = free_bytes(scratch.path()) >= in_use + kSize * 3 / 4;
    if (!freed) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_TRUE(freed) << "the blocks are not given back";
}

}  // namespace
}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
// A full disk is an error when space is reserved, and never in mid-step.
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include "pagoda/io/swap_space.h"
#include "unit/io/space_kinds.h"

namespace pagoda::io {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A disk of 8 MiB in a mount namespace of this process: it goes when the process does.
class SmallDisk {
 public:
  explicit SmallDisk(const std::filesystem::path& at) : at_(at) {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, "") != 0 ||
        ::mount("tmpfs", at.c_str(), "tmpfs", 0, "size=8m") != 0) {
      reason_ = std::strerror(errno);
    }
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  ~SmallDisk() {
    if (reason_.empty()) ::umount2(at_.c_str(), MNT_DETACH);
  }
  /// Why there is none; empty when there is.
  const std::string& reason() const { return reason_; }

 private:
  std::filesystem::path at_;
  std::string reason_;
};

std::string refusal(const SwapOptions& options) {
  Budget budget("nvme", options.capacity);
  try {
    const SwapSpace space(options, budget);
  } catch (const UserError& error) {
    EXPECT_EQ(budget.used(), 0U) << "what was reserved is given back";
    return error.what();
  }
  return "no error";
}

TEST(SwapFullDisk, MoreThanThereIsIsRefusedWithSizes) {
  const ScratchDirectory scratch;
  SwapOptions options;
  options.directories = {scratch.path()};
  options.capacity = 4096_GiB * 1024;
  EXPECT_THAT(refusal(options), AllOf(HasSubstr(scratch.path().string()), HasSubstr("4 PiB"),
                                      HasSubstr("free"), HasSubstr("ENOSPC")));
}

TEST(SwapFullDisk, ASmallDiskIsRefusedWhole) {
  const ScratchDirectory scratch;
  const SmallDisk disk(scratch.path());
  if (!disk.reason().empty()) GTEST_SKIP() << "cannot mount a tmpfs: " << disk.reason();
  for (const Preallocate how : {Preallocate::Reserve, Preallocate::Zero}) {
    SwapOptions options;
    options.directories = scratch.disks(2);
    options.capacity = 9_MiB;
    options.preallocate = how;
    EXPECT_THAT(refusal(options), HasSubstr("does not fit"));
  }
}

TEST(SwapFullDisk, ReservedSpaceCanBeWrittenWhenTheDiskIsFull) {
  const ScratchDirectory scratch;
  const SmallDisk disk(scratch.path());
  if (!disk.reason().empty()) GTEST_SKIP() << "cannot mount a tmpfs: " << disk.reason();
  SwapOptions options;
  options.directories = {scratch.path()};
  options.capacity = 5_MiB;
  Budget budget("nvme", options.capacity);
  SwapSpace space(options, budget);
  // Somebody else takes the rest.
  const int other = ::open((scratch.path() / "other").c_str(), O_CREAT | O_WRONLY, 0600);
  ASSERT_GE(other, 0);
  const std::vector<char> filling(64_KiB, 'x');
  while (::write(other, filling.data(), filling.size()) > 0) {
  }
  EXPECT_EQ(errno, ENOSPC);
  const Extent extent = space.allocate(5_MiB);
  const auto bytes = random_bytes(5_MiB, 9);
  space.write(extent, 0, bytes).wait();
  std::vector<std::byte> read(bytes.size());
  space.read(extent, 0, read).wait();
  EXPECT_TRUE(read == bytes);
  ::close(other);
}

}  // namespace
}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/cgroup_memory.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

namespace pagoda {
namespace {

class CgroupMemory : public testing::Test {
 protected:
  CgroupMemory()
      : mounts_(std::filesystem::temp_directory_path() /
                ("pagoda-cgroups-" + std::to_string(::getpid()))) {}
  ~CgroupMemory() override { std::filesystem::remove_all(mounts_); }

  void write(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = mounts_ / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
  }

  const std::filesystem::path mounts_;
};

TEST_F(CgroupMemory, OfVersion2IsWhatAnyGroupAboveLeaves) {
  write("a/memory.max", "1000");
  write("a/memory.high", "max");
  write("a/memory.current", "700");
  write("a/memory.stat", "anon 500\ninactive_file 150\n");
  write("a/b/memory.max", "max");
  write("a/b/memory.high", "600");
  write("a/b/memory.current", "50");
  auto limit = cgroup_memory_limit(mounts_, "0::/a/b\n");
  ASSERT_TRUE(limit.has_value());
  EXPECT_EQ(limit->name, "cgroup memory.max");  // 450 are left there, and 550 below it
  EXPECT_EQ(limit->left(), 450U);
  write("a/b/memory.current", "500");
  limit = cgroup_memory_limit(mounts_, "0::/a/b\n");
  ASSERT_TRUE(limit.has_value());
  EXPECT_EQ(limit->name, "cgroup memory.high");
  EXPECT_EQ(limit->left(), 100U);
}

TEST_F(CgroupMemory, OfVersion1HasItsOwnMount) {
  const char* own = "5:devices:/\n4:cpu,memory:/a\n0::/\n";
  write("memory/a/memory.limit_in_bytes", "9223372036854771712");
  write("memory/a/memory.usage_in_bytes", "100");
  EXPECT_FALSE(cgroup_memory_limit(mounts_, own).has_value());
  write("memory/a/memory.limit_in_bytes", "1000");
  write("memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 40\n");
  const auto limit = cgroup_memory_limit(mounts_, own);
  ASSERT_TRUE(limit.has_value());
  EXPECT_EQ(limit->left(), 940U);
}

TEST_F(CgroupMemory, IsFoundWhereAContainerMountsItsOwnGroupAsTheRoot) {
  write("memory.max", "4096");
  write("memory.current", "96");
  const auto limit = cgroup_memory_limit(mounts_, "0::/somewhere/on/the/host\n");
  ASSERT_TRUE(limit.has_value());
  EXPECT_EQ(limit->left(), 4000U);
}

TEST_F(CgroupMemory, IsNothingWhereNoneIsSet) {
  EXPECT_FALSE(cgroup_memory_limit(mounts_, "").has_value());
  EXPECT_FALSE(cgroup_memory_limit(mounts_, "0::/\nrubbish\n1:memory\n").has_value());
}

}  // namespace
}  // namespace pagoda

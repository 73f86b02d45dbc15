// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/cgroup_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include <fmt/format.h>

namespace pagoda {
namespace {

namespace fs = std::filesystem;

/// The names of what one version of control groups says.
struct Files {
  const char* limits[2];  // null: there is no second one
  const char* used;
  const char* inactive;  // of the page cache: lines of memory.stat
  const char* active;
};

constexpr Files kVersion1{{"memory.limit_in_bytes", nullptr},
                          "memory.usage_in_bytes",
                          "total_inactive_file",
                          "total_active_file"};
constexpr Files kVersion2{
    {"memory.max", "memory.high"}, "memory.current", "inactive_file", "active_file"};

/// Nothing where the file does not exist or says "max".
std::optional<Bytes> number_in(const fs::path& file) {
  Bytes value = 0;
  if (std::ifstream(file) >> value) return value;
  return std::nullopt;
}

/// Of the page cache, what the kernel gives up easily; of what is in use there half, as it counts
/// itself for MemAvailable.
Bytes reclaimable_in(const fs::path& directory, const Files& files) {
  std::ifstream stat(directory / "memory.stat");
  std::string key;
  Bytes sum = 0;
  for (Bytes value = 0; stat >> key >> value;) {
    if (key == files.inactive) sum += value;
    if (key == files.active) sum += value / 2;
  }
  return sum;
}

void take_tightest(const fs::path& directory, const Files& files,
                   std::optional<MemoryLimit>& tightest) {
  constexpr Bytes kUnlimited = Bytes{1} << 60;  // version 1 has the largest number of pages
  const std::optional<Bytes> used = number_in(directory / files.used);
  if (!used) return;
  for (const char* name : files.limits) {
    if (name == nullptr) continue;
    const std::optional<Bytes> allowed = number_in(directory / name);
    if (!allowed || *allowed >= kUnlimited) continue;
    const Bytes cache = std::min(*used, reclaimable_in(directory, files));
    MemoryLimit found{fmt::format("cgroup {}", name), *allowed, *used - cache};
    if (!tightest || found.left() < tightest->left()) tightest = std::move(found);
  }
}

/// The group's and those above it, up to the mount.
void take_tightest(const fs::path& mount, std::string_view group, const Files& files,
                   std::optional<MemoryLimit>& tightest) {
  fs::path below = fs::path(group).relative_path();
  for (;; below = below.parent_path()) {
    take_tightest(mount / below, files, tightest);
    if (below.empty()) return;
  }
}

}  // namespace

std::optional<MemoryLimit> cgroup_memory_limit(const fs::path& mounts, std::string_view own) {
  std::optional<MemoryLimit> tightest;
  std::istringstream lines{std::string(own)};
  for (std::string line; std::getline(lines, line);) {  // "4:memory:/path", "0::/path"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers =
        fmt::format(",{},", std::string_view(line).substr(first + 1, second - first - 1));
    const std::string_view group = std::string_view(line).substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) {
      take_tightest(mounts / "memory", group, kVersion1, tightest);
    } else if (controllers == ",,") {
      take_tightest(mounts, group, kVersion2, tightest);
    }
  }
  return tightest;
}

std::optional<MemoryLimit> cgroup_memory_limit() {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream own;
  own << file.rdbuf();
  return cgroup_memory_limit("/sys/fs/cgroup", own.str());
}

}  // namespace pagoda

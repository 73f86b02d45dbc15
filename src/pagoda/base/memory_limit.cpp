// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include "pagoda/base/cgroup_memory.h"

namespace pagoda {
namespace {

struct Kind {
  __rlimit_resource resource;
  const char* name;
  const char* used;  // its line in /proc/self/status
};

constexpr Kind kKinds[] = {{RLIMIT_AS, "RLIMIT_AS (ulimit -v)", "VmSize:"},
                           {RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)", "VmData:"}};

/// What this process has of it; nothing where the kernel does not say.
std::optional<Bytes> used_of(const char* line) {
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    Bytes kib = 0;
    if (key == line && status >> kib) return kib * 1_KiB;
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

/// What the kernel could give without swapping; where it does not say, what is free.
Bytes of_the_machine() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key; meminfo >> key;) {
    Bytes kib = 0;
    if (key == "MemAvailable:" && meminfo >> kib) return kib * 1_KiB;
    meminfo.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  struct sysinfo info {};
  return ::sysinfo(&info) == 0 ? info.freeram * Bytes{info.mem_unit} : 0;
}

}  // namespace

std::string MemoryLimit::describe() const {
  return fmt::format("{} allows this process {}, of which {} are in use", name,
                     format_bytes(allowed), format_bytes(used));
}

std::optional<MemoryLimit> tightest_memory_limit() {
  std::optional<MemoryLimit> tightest;
  for (const Kind& kind : kKinds) {
    struct rlimit limit {};
    if (::getrlimit(kind.resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    const std::optional<Bytes> used = used_of(kind.used);
    if (!used) continue;
    MemoryLimit found{kind.name, limit.rlim_cur, *used};
    if (!tightest || found.left() < tightest->left()) tightest = std::move(found);
  }
  return tightest;
}

Bytes available_to_all() {
  const Bytes left = of_the_machine();
  const auto limit = cgroup_memory_limit();
  return limit ? std::min(left, limit->left()) : left;
}

Bytes available_memory() {
  const Bytes left = available_to_all();
  const auto limit = tightest_memory_limit();
  return limit ? std::min(left, limit->left()) : left;
}

std::string refused_memory(Bytes bytes) {
  const auto limit = tightest_memory_limit();
  if (!limit || bytes <= limit->left()) return "out of host memory";
  return fmt::format("out of host memory: {}, and {} more are needed; raise the limit",
                     limit->describe(), format_bytes(bytes));
}

}  // namespace pagoda

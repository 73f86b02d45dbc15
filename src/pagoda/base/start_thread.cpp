// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/start_thread.h"

#include <fstream>
#include <string>

#include <pthread.h>
#include <sys/resource.h>

#include "pagoda/base/error.h"
#include "pagoda/base/memory_limit.h"

namespace pagoda {
namespace {

Bytes stack_of_a_thread() {
  pthread_attr_t attributes;
  std::size_t bytes = 0;
  if (::pthread_getattr_default_np(&attributes) != 0) return 0;
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  return bytes;
}

std::string most_processes() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_NPROC, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return "unlimited";
  }
  return fmt::format("{}", limit.rlim_cur);
}

/// As a container sees its own group; empty where there is none.
std::string most_in_group() {
  std::string most;
  for (const char* file : {"/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"}) {
    if (std::ifstream(file) >> most && most != "max") return most;
  }
  return {};
}

/// The kernel says no more than "try again", whichever limit it was.
std::string limits() {
  const Bytes stack = stack_of_a_thread();
  if (const auto memory = tightest_memory_limit(); memory && memory->left() < stack) {
    return fmt::format("its stack takes {} (ulimit -s), and {}", format_bytes(stack),
                       memory->describe());
  }
  const std::string group = most_in_group();
  return fmt::format(
      "ulimit -u allows this user {} processes and threads, and a container's pids "
      "limit {}",
      most_processes(), group.empty() ? "may allow fewer" : "allows " + group);
}

}  // namespace

void refuse_thread(const std::error_code& cause) {
  throw EngineError(
      fmt::format("no thread can be started: {}; raise the limit, or lower fetch_threads and "
                  "update_threads",
                  limits()),
      {context("errno", cause.value()), context("cause", cause.message())});
}

}  // namespace pagoda

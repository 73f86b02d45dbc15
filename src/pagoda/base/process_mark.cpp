// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/process_mark.h"

#include <cerrno>
#include <csignal>
#include <fstream>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

namespace pagoda {
namespace {

/// Of the machine's start and the namespace of process numbers: numbers are compared within one.
std::string read_numbering() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat space {};
  if (!(file >> boot) || ::stat("/proc/self/ns/pid", &space) != 0) return {};
  return fmt::format("{}/{}", boot, space.st_ino);
}

const std::string& numbering() {
  static const auto& read = *new std::string(read_numbering());
  return read;
}

struct Status {
  char state = 0;
  long threads = 0;
  unsigned long long started = 0;
};

/// From /proc/PID/stat, whose second field may have spaces and parentheses.
std::optional<Status> status_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string line((std::istreambuf_iterator<char>(file)), {});
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  Status status;
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 20; ++field) fields >> skipped;
  fields >> status.threads >> skipped >> status.started;
  return fields ? std::optional(status) : std::nullopt;
}

}  // namespace

std::string process_mark() {
  const auto status = status_of(::getpid());
  if (numbering().empty() || !status) return {};
  return fmt::format("{} {} {}", numbering(), ::getpid(), status->started);
}

bool process_has_ended(const std::string& mark) {
  std::istringstream text(mark);
  std::string numbers;
  pid_t pid = 0;
  unsigned long long started = 0;
  if (!(text >> numbers >> pid >> started) || numbers != numbering()) return false;
  if (::kill(pid, 0) != 0 && errno == ESRCH) return true;
  const auto status = status_of(pid);
  if (!status) return false;  // not ours to see
  const bool zombie = (status->state == 'Z' || status->state == 'X') && status->threads <= 1;
  return zombie || status->started != started;
}

}  // namespace pagoda

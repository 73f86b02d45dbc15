// SPDX-License-Identifier: Apache-2.0
#include "fio.h"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pagoda/base/error.h"

extern char** environ;

namespace pagoda::cli {
namespace {

/// Files to take away when a signal ends the program: fio's need names. Changed only while the
/// handlers are not set.
std::vector<std::string> doomed;

/// fio, while it runs: stopped first, for it would make its file again.
volatile sig_atomic_t running = 0;

void remove_and_die(int signal) {
  if (const pid_t child = running; child > 0) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  for (const std::string& path : doomed) ::unlink(path.c_str());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void remove_doomed() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);
  for (const std::string& path : doomed) ::unlink(path.c_str());
  doomed.clear();
}

/// Runs `arguments[0]` and returns what it printed. EngineError when it fails.
std::string output_of(const std::vector<std::string>& arguments) {
  int out[2];
  if (::pipe(out) != 0) throw EngineError("no pipe", {context("errno", errno)});
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  ::posix_spawn_file_actions_adddup2(&actions, out[1], 2);
  ::posix_spawn_file_actions_addclose(&actions, out[0]);
  ::posix_spawn_file_actions_addclose(&actions, out[1]);
  std::vector<char*> pointers;
  for (const std::string& argument : arguments) {
    pointers.push_back(const_cast<char*>(argument.c_str()));
  }
  pointers.push_back(nullptr);
  pid_t child = 0;
  const int error =
      ::posix_spawnp(&child, pointers[0], &actions, nullptr, pointers.data(), environ);
  if (error == 0) running = child;
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(out[1]);
  std::string text;
  char part[4096];
  for (ssize_t got = 0; error == 0 && (got = ::read(out[0], part, sizeof(part))) != 0;) {
    if (got > 0) text.append(part, static_cast<std::size_t>(got));
    if (got < 0 && errno != EINTR) break;
  }
  ::close(out[0]);
  int status = 0;
  const bool ended = error == 0 && ::waitpid(child, &status, 0) == child;
  running = 0;
  if (!ended || status != 0) {
    throw EngineError(arguments[0] + " failed: " + (error != 0 ? std::strerror(error) : text),
                      {context("status", status)});
  }
  return text;
}

}  // namespace

bool Fio::present() {
  try {
    output_of({"fio", "--version"});
    return true;
  } catch (const EngineError&) {
    return false;
  }
}

Fio::Fio(const std::vector<std::filesystem::path>& directories, Bytes size)
    : count_(directories.size()), size_(size) {
  for (const auto& directory : directories) {
    doomed.push_back((std::filesystem::absolute(directory) /
                      fmt::format(".pagoda-bench-{}-{}.fio", ::getpid(), doomed.size()))
                         .string());
    files_ += (files_.empty() ? "" : ":") + doomed.back();
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, remove_and_die);
  try {
    // Written once, so that reads find data and writes are overwrites, as ours are.
    output_of({"fio", "--name=layout", "--filename=" + files_, fmt::format("--size={}", size),
               "--rw=write", "--bs=1M", "--direct=1", "--ioengine=io_uring", "--iodepth=16",
               "--output-format=json"});
  } catch (...) {
    remove_doomed();
    throw;
  }
}

Fio::~Fio() {
  remove_doomed();
}

double Fio::run(const DiskLoad& load) {
  const char* pattern = load.kind == DiskLoad::Kind::Read    ? "read"
                        : load.kind == DiskLoad::Kind::Write ? "write"
                                                             : "rw";
  const std::string text = output_of(
      {"fio", "--name=bench", "--filename=" + files_, fmt::format("--size={}", size_),
       fmt::format("--rw={}", pattern), "--rwmixread=50", fmt::format("--bs={}", load.block),
       fmt::format("--iodepth={}", load.depth * count_), "--direct=1", "--ioengine=io_uring",
       "--registerfiles", "--fixedbufs", "--overwrite=1", "--numjobs=1", "--time_based",
       "--scramble_buffers=0",  // what is written is the same each time, as ours is
       fmt::format("--runtime={:.0f}ms", load.seconds * 1e3), "--output-format=json"});
  // Warnings may stand before the object.
  const auto report = nlohmann::json::parse(text.substr(text.find('{')));
  const auto& job = report.at("jobs").at(0);
  const double bytes =
      job.at("read").at("io_bytes").get<double>() + job.at("write").at("io_bytes").get<double>();
  const double milliseconds = job.at("job_runtime").get<double>();
  return bytes / (milliseconds * 1e-3);
}

}  // namespace pagoda::cli

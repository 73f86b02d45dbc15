// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pagoda/base/error.h"

namespace zoo {

/// A port that nobody has, on this machine.
inline int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  PAGODA_CHECK_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  PAGODA_CHECK_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

/// A program that is running, and what it prints. Killed when this goes.
class Process {
 public:
  /// `environment` is added to this process's own.
  Process(const std::vector<std::string>& command,
          const std::map<std::string, std::string>& environment) {
    int ends[2];
    PAGODA_CHECK_EQ(::pipe2(ends, O_CLOEXEC), 0);
    std::vector<std::string> texts;
    for (char** entry = environ; *entry != nullptr; ++entry) texts.emplace_back(*entry);
    for (const auto& [name, value] : environment) texts.push_back(name + "=" + value);
    std::vector<char*> entries;
    for (std::string& text : texts) entries.push_back(text.data());
    entries.push_back(nullptr);
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::execve(arguments[0], arguments.data(), entries.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    output_ = ::fdopen(ends[0], "r");
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (pid_ > 0) {
      signal(SIGKILL);
      wait();
    }
    std::fclose(output_);
  }

  pid_t pid() const { return pid_; }
  void signal(int number) { ::kill(pid_, number); }

  /// The next line, or "" at the end.
  std::string line() {
    std::string text;
    for (int c = std::fgetc(output_); c != EOF && c != '\n'; c = std::fgetc(output_)) {
      text.push_back(static_cast<char>(c));
    }
    return text;
  }
  /// The next line that begins so, or "" at the end.
  std::string line_with(const std::string& begin) {
    std::string text = line();
    while (!text.empty() && !text.starts_with(begin)) text = line();
    return text;
  }

  /// Its exit status, or 128 and the signal.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  std::FILE* output_ = nullptr;
};

}  // namespace zoo

// SPDX-License-Identifier: Apache-2.0
// One of two ranks, for gloo_processes.cpp: VICTIM waits to be killed; the other blocks in a
// collective and in a pull from it, and prints how each ended, a line each. With UNNOTICED set, the
// other sends to it after its death, while the threads that would see the connection close are
// held.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include <unistd.h>

#include "pagoda/comm/pull_service.h"
#include "pagoda/comm/watch.h"
#include "pagoda/torch/gloo_world.h"

namespace {

using namespace pagoda;
using std::chrono::milliseconds;
using std::chrono::seconds;

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

template <class Fn>
void say_error_of(const std::string& what, Fn&& fn) {
  try {
    fn();
    say(what + ": no error");
  } catch (const EngineError& error) {
    say(what + ": " + error.what());
  }
}

std::set<pid_t> threads_here() {
  std::set<pid_t> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    threads.insert(std::stoi(entry.path().filename()));
  }
  return threads;
}

/// Holds the threads that this process has and had not at `before` in a signal handler.
class HeldThreads {
 public:
  explicit HeldThreads(const std::set<pid_t>& before) {
    struct sigaction hold {};
    hold.sa_handler = [](int) {
      const int error = errno;
      ++held_;
      while (!let_go_) ::usleep(1000);
      errno = error;
    };
    ::sigaction(SIGUSR1, &hold, nullptr);
    int sent = 0;
    for (const pid_t thread : threads_here()) {
      if (!before.contains(thread)) sent += ::tgkill(::getpid(), thread, SIGUSR1) == 0;
    }
    while (held_ < sent) ::usleep(1000);
  }
  HeldThreads(const HeldThreads&) = delete;
  HeldThreads& operator=(const HeldThreads&) = delete;
  ~HeldThreads() { let_go_ = true; }

 private:
  static inline std::atomic<int> held_ = 0;
  static inline std::atomic<bool> let_go_ = false;
};

/// The first write after a rank's death is answered with a reset, the second one is refused.
void send_unnoticed(int victim) {
  const auto world =
      pagoda::torch::world_from_env({.address = "127.0.0.1", .linger = milliseconds(100)});
  const std::set<pid_t> before = threads_here();
  const auto group = world->make_group("sends");
  group->barrier();
  if (world->rank() == victim) {
    world->put("pid of the victim", std::to_string(::getpid()));
    say("ready");
    while (true) ::pause();
  }
  std::optional<std::string> pid;
  while (!(pid = world->get("pid of the victim"))) ::usleep(1000);
  ::usleep(50'000);  // they are done with the barrier, and hold no lock of others
  auto held = std::make_optional<HeldThreads>(before);
  say("ready");
  while (::kill(std::stoi(*pid), 0) == 0) ::usleep(1000);
  std::vector<std::thread> senders;
  for (int i = 0; i < 4; ++i) {
    senders.emplace_back([&, i] {
      const std::byte data{};
      say_error_of("send " + std::to_string(i), [&] {
        group->send(victim, static_cast<comm::Tag>(i), {&data, 1});
      });
    });
    ::usleep(20'000);  // for the reset to arrive
  }
  held.reset();
  for (std::thread& sender : senders) sender.join();
}

void block(int victim) {
  const auto world = pagoda::torch::world_from_env(
      {.address = "127.0.0.1", .board_timeout = seconds(3), .linger = milliseconds(100)});
  const auto group = world->make_group("collectives");
  comm::PullService service(world->make_group("pull"), [](const auto&, comm::PullReply& reply) {
    reply.about_to_wait();
    while (!reply.stop().stop_requested()) std::this_thread::sleep_for(milliseconds(5));
  });
  comm::Watch watch(*world, {.interval = milliseconds(50), .timeout = milliseconds(700)},
                    [&](int, const std::string& reason) {
                      say("watch: " + reason);
                      group->abort(reason);
                      service.abort(reason);
                    });
  group->barrier();
  if (world->rank() == victim) {
    say("ready");
    while (true) ::pause();
  }
  std::thread puller([&] {
    std::vector<std::byte> out(100);
    say_error_of("pull", [&] { service.pull(victim, 1, 1, 0, out); });
  });
  say("ready");
  say_error_of("barrier", [&] { group->barrier(); });
  puller.join();
  watch.leave();
}

}  // namespace

int main() {
  try {
    const int victim = std::atoi(std::getenv("VICTIM"));
    std::getenv("UNNOTICED") != nullptr ? send_unnoticed(victim) : block(victim);
    say("end");
    return 0;
  } catch (const std::exception& error) {
    say(std::string("failed: ") + error.what());
    return 1;
  }
}

// SPDX-License-Identifier: Apache-2.0
// One of two ranks, for gloo_processes.cpp: VICTIM waits to be killed; the other blocks in a
// collective and in a pull from it, and prints how each ended, a line each.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include <unistd.h>

#include "pagoda/comm/pull_service.h"
#include "pagoda/comm/watch.h"
#include "pagoda/torch/gloo_world.h"

namespace {

using namespace pagoda;
using std::chrono::milliseconds;

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

void run(int victim) {
  const auto world = pagoda::torch::world_from_env(
      {.address = "127.0.0.1", .board_timeout = milliseconds(700), .linger = milliseconds(100)});
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
    run(std::atoi(std::getenv("VICTIM")));
    say("end");
    return 0;
  } catch (const std::exception& error) {
    say(std::string("failed: ") + error.what());
    return 1;
  }
}

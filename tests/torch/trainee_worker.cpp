// SPDX-License-Identifier: Apache-2.0
// A rank of training_processes_test.cpp and no_leak_test.cpp: trains in the world that its
// environment names and prints "step N" after each step, then "result <fingerprint>", or "error
// <text>".
//   trainee_worker KIND ZERO STEPS [SWAP DIRECTORY]
#include <cstdio>
#include <cstdlib>
#include <string>

#include "pagoda/base/error.h"
#include "torch/trainee.h"

namespace {

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void train(int argc, char** argv) {
  PAGODA_REQUIRE_GE(argc, 4, "trainee_worker KIND ZERO STEPS [SWAP DIRECTORY]");
  const zoo::Options options{.kind = zoo::parse_kind(argv[1])};
  pagoda::Config config = zoo::crowded(options);
  config.zero = static_cast<unsigned>(std::atoi(argv[2]));
  config.timeout = 3;
  config.heartbeat = 0.1;
  const int steps = std::atoi(argv[3]);
  if (argc > 4) {
    config.nvme = {argv[4]};
    config.nvme_budget = 64U << 20U;
    config.parameters = config.gradients = config.optimizer_state = pagoda::Placement::Nvme;
  }
  const auto world = zoo::world_of_environment();
  zoo::Trainee trainee(options, {.ranks = world->size()}, config, world);
  std::vector<std::uint32_t> losses;
  for (int step = 0; step < steps; ++step) {
    losses.push_back(trainee.train(step));
    say("step " + std::to_string(step));
  }
  trainee.finish();
  say(fmt::format("result {:016x}", zoo::fingerprint(losses, trainee.parameters())));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(argc, argv);
    return 0;
  } catch (const std::exception& error) {
    std::string text = error.what();
    say("error " + text.substr(0, text.find('\n')));
    return 3;
  }
}

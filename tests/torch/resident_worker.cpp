// SPDX-License-Identifier: Apache-2.0
// A process of budget_test.cpp: trains a model of 1 GiB for a step and prints "resident BYTES
// counted BYTES": how far its resident memory rose above what it was with torch and a small engine
// loaded, and what the engine's budgets say that it had at most.
//   resident_worker host|nvme DIRECTORY
#include <cstdio>
#include <fstream>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <malloc.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "pagoda/base/error.h"
#include "pagoda/pager/tier.h"
#include "pagoda/torch/engine.h"

namespace {

using namespace pagoda::literals;
using pagoda::Bytes;

/// A line of /proc/self/status, in bytes.
Bytes status(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::stoull(line.substr(key.size() + 1)) << 10U;
  }
  throw pagoda::EngineError("there is no " + key);
}

struct Peak {
  Bytes device, host;
};

Peak train(const pagoda::Config& config, int layers, std::int64_t width) {
  pagoda::Engine engine(config);
  auto model = engine.build([&] {
    torch::nn::Sequential layers_of_it;
    for (int i = 0; i < layers; ++i) {
      layers_of_it->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    }
    return layers_of_it;
  });
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // what torch frees is not resident any more
  engine.attach(*model, pagoda::AdamW{});
  engine.backward(model->forward(at::ones({4, width})).sum());
  engine.step();
  engine.finish();
  const auto tiers = engine.stats().tiers;
  return {tiers[static_cast<std::size_t>(pagoda::pager::Tier::Device)].peak,
          tiers[static_cast<std::size_t>(pagoda::pager::Tier::Host)].peak};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    PAGODA_REQUIRE_EQ(argc, 3, "resident_worker host|nvme DIRECTORY");
    at::set_num_threads(1);  // each has an arena of its own in malloc
    pagoda::Config config;
    config.device = "cpu";
    config.device_budget = 192_MiB;
    config.gradient_staging = 16_MiB;  // one layer's: all of it is used
    config.staging = config.update_chunk = 1_MiB;
    config.update_buffers = 4;  // they have room for more than this optimizer's states
    for (const char* key : {"parameters", "gradients", "optimizer_state"}) config.set(key, argv[1]);
    if (std::string(argv[1]) == "nvme") {
      config.nvme = {argv[2]};
      config.nvme_budget = 6_GiB;
    }
    train(config, 2, 1024);
    std::ofstream("/proc/self/clear_refs") << "5";  // the high-water mark falls to what is now
    const Bytes before = status("VmRSS");
    const Peak peak = train(config, 64, 2048);
    std::printf("resident %llu counted %llu\n",
                static_cast<unsigned long long>(status("VmHWM") - before),
                static_cast<unsigned long long>(peak.device + peak.host));
    return 0;
  } catch (const std::exception& error) {
    std::printf("error %s\n", error.what());
    return 1;
  }
}

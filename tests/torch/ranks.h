// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of a test.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "pagoda/comm/thread_world.h"
#include "pagoda/comm/world.h"
#include "torch/trainee.h"

namespace zoo {

using RankBody = std::function<void(const std::shared_ptr<pagoda::comm::World>&)>;

/// Runs `body` once for each world, each on a thread of its own; how each ended.
inline std::vector<Ending> run_ranks(
    const std::vector<std::shared_ptr<pagoda::comm::World>>& worlds, const RankBody& body) {
  std::vector<Ending> endings(worlds.size());
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < worlds.size(); ++r) {
    threads.emplace_back([&, r] { endings[r] = ending_of([&] { body(worlds[r]); }); });
  }
  threads.clear();
  return endings;
}

inline std::vector<Ending> run_ranks(int ranks, const RankBody& body) {
  return run_ranks(pagoda::comm::make_thread_worlds(ranks), body);
}

}  // namespace zoo

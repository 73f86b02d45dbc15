// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "pagoda/torch/gloo_world.h"
#include "unit/comm/world_case.h"

namespace pagoda::comm {
namespace {

Worlds make_gloo_worlds(int ranks) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  Worlds worlds;
  for (int r = 0; r < ranks; ++r) {
    worlds.push_back(torch::world_from_store(store, r, ranks, {.address = "127.0.0.1"}));
  }
  return worlds;
}

/// As of groups that a user has made; twice, so that two worlds of one group share a store.
Worlds make_worlds_of_groups(int ranks) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  Worlds worlds;
  for (int world = 0; world < 2; ++world) {
    worlds.clear();
    for (int r = 0; r < ranks; ++r) {
      const ::c10d::ProcessGroup group(store, r, ranks);
      worlds.push_back(torch::world_from_group(group, nullptr, {.address = "127.0.0.1"}));
    }
  }
  return worlds;
}

}  // namespace

std::vector<WorldCase> world_cases() {
  std::vector<WorldCase> cases;
  for (int n = 1; n <= 4; ++n) cases.push_back({"gloo_" + std::to_string(n), n, make_gloo_worlds});
  cases.push_back({"group_2", 2, make_worlds_of_groups});
  return cases;
}

}  // namespace pagoda::comm

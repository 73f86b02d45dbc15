// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/solo_world.h"
#include "unit/comm/world_case.h"

namespace pagoda::comm {

std::vector<WorldCase> world_cases() {
  const auto threads = [](int ranks) { return make_thread_worlds(ranks); };
  std::vector<WorldCase> cases{{"solo", 1, [](int) { return Worlds{make_solo_world()}; }}};
  for (int n = 2; n <= 4; ++n) cases.push_back({"threads_" + std::to_string(n), n, threads});
  return cases;
}

}  // namespace pagoda::comm

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/update_record.h"

#include <algorithm>
#include <array>
#include <utility>

#include "pagoda/base/error.h"

namespace pagoda::optim {

void UpdateRecord::enter(Stage to) {
  using enum Stage;
  static constexpr std::array<std::pair<Stage, Stage>, 14> kTable = {{
      {Idle, Queued},               // step()
      {Idle, EarlyQueued},          // the gradient is complete
      {EarlyQueued, Queued},        // step(): an ordinary one
      {EarlyQueued, EarlyRunning},  // its turn
      {EarlyQueued, Idle},          // rolled back
      {EarlyRunning, Running},      // step()
      {EarlyRunning, RollingBack},  // rolled back
      {EarlyRunning, Computed},     // the last chunk
      {RollingBack, Idle},          // the last chunk under way
      {Computed, Idle},             // step(): published; or rolled back
      {Computed, Copying},          // step()
      {Queued, Running},            // its turn
      {Running, Idle},              // published
      {Copying, Idle},              // published
  }};
  PAGODA_CHECK(std::find(kTable.begin(), kTable.end(), std::pair(stage_, to)) != kTable.end(),
               "an update of page {} goes from stage {} to {}", page->page->name(),
               static_cast<int>(stage_), static_cast<int>(to));
  stage_ = to;
  if (to == Idle || to == Queued) {
    next = nullptr;
    reversible = false;
  }
}

}  // namespace pagoda::optim

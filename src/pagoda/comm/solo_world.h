// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "pagoda/comm/thread_world.h"

namespace pagoda::comm {

/// One rank, alone: collectives copy, and nobody sends anything.
inline std::shared_ptr<World> make_solo_world() {
  return make_thread_worlds(1).front();
}

}  // namespace pagoda::comm

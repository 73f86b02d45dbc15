// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "pagoda/base/clock.h"
#include "pagoda/comm/world.h"

namespace pagoda::comm {

/// How fast one rank's bytes leave it, to all peers and by all groups together.
struct LinkSpeed {
  /// 0: as fast as this machine copies.
  double bytes_per_second = 0;
  /// From the last byte sent to its arrival.
  Nanos latency = 0;
};

/// `ranks` worlds whose ranks are threads of this process and exchange bytes in memory; one world
/// each. `links` is empty or has one speed a rank: a send then takes its bytes' time on the
/// sender's link, one send after another.
///
/// A message goes from the sender's memory straight into the receiver's, so a send waits for its
/// receiver, and what relies on buffering fails here too. make_group() does not wait for the
/// others.
std::vector<std::shared_ptr<World>> make_thread_worlds(int ranks,
                                                       std::span<const LinkSpeed> links = {});

}  // namespace pagoda::comm

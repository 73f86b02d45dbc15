// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/device/stream.h"

namespace pagoda::device {

/// Free bytes that a stream may still be using: whoever takes them waits for the mark first.
struct Fence {
  Bytes begin = 0;  // offsets in the arena
  Bytes end = 0;
  Mark mark;
};
using Fences = std::vector<Fence>;

/// The fences that meet [begin, end), cut to it.
Fences fences_within(const Fences& fences, Bytes begin, Bytes end);

/// Appends `more` to `fences`, leaves out those whose work is over, and keeps the list short: when
/// it has become long, a stream's fences are put together as its latest mark over their whole
/// extent, which is never too little.
void add_fences(Fences& fences, Fences more);

}  // namespace pagoda::device

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/cut.h"

#include <algorithm>

namespace pagoda::io {

void cut_range(const Grid& grid, Bytes extent_begin, Bytes extent_end, Bytes begin, Bytes end,
               std::vector<Cut>& cuts) {
  const auto block_begin = [&](Bytes position) {
    return std::max(extent_begin, align_down(position, grid.block));
  };
  const auto block_end = [&](Bytes position) {
    return std::min(extent_end, align_down(position, grid.block) + grid.block);
  };
  for (Bytes at = begin; at < end;) {
    const Bytes first_begin = block_begin(at);
    const Bytes first_end = block_end(at);
    if (at != first_begin || end < first_end) {
      const Bytes stop = std::min(end, first_end);
      cuts.push_back({at, stop, first_begin, first_end});
      at = stop;
      continue;
    }
    Bytes stop = std::min(end, align_down(at, grid.cell) + grid.cell);
    if (stop != extent_end) {
      stop = align_down(stop, grid.block);
    } else if (stop % grid.align != 0 && block_begin(stop - 1) > at) {
      stop = block_begin(stop - 1);
    }
    cuts.push_back({at, stop, at, stop});
    at = stop;
  }
}

}  // namespace pagoda::io

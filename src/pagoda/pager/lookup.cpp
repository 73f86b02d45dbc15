// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/lookup.h"

namespace pagoda::pager {

std::vector<Range> elements_of(std::span<const std::int64_t> rows, const Lookup& lookup) {
  const std::uint64_t all = (lookup.page->elements - lookup.first) / lookup.width;
  std::vector<bool> wanted(all);
  for (const std::int64_t row : rows) {
    if (row >= 0 && static_cast<std::uint64_t>(row) < all) {
      wanted[static_cast<std::size_t>(row)] = true;
    }
  }
  std::vector<Range> out;
  for (std::uint64_t row = 0; row < all; ++row) {
    if (!wanted[row]) continue;
    const std::uint64_t begin = lookup.first + row * lookup.width;
    if (!out.empty() && out.back().end == begin) {
      out.back().end += lookup.width;
    } else {
      out.push_back({begin, begin + lookup.width});
    }
  }
  return out;
}

}  // namespace pagoda::pager

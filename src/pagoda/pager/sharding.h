// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace pagoda::pager {

/// Elements [begin, end) of a page.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  constexpr std::uint64_t size() const noexcept { return end - begin; }
  constexpr bool empty() const noexcept { return begin == end; }
  constexpr bool operator==(const Range&) const noexcept = default;
};

/// How pages are cut over the ranks: equal shards, in rank order, of whole blocks of elements.
///
/// A block is what sums of squares are defined over (docs/notes/numerics.md), so that a norm has
/// the same bits however many ranks there are. A page smaller than a block lies on the first rank.
struct Sharding {
  static constexpr std::uint64_t kBlock = 4096;

  int ranks = 1;

  constexpr Range of(std::uint64_t elements, int rank) const noexcept {
    const auto n = static_cast<std::uint64_t>(ranks);
    const std::uint64_t blocks = (elements + kBlock - 1) / kBlock;
    const std::uint64_t each = (blocks + n - 1) / n * kBlock;
    const auto r = static_cast<std::uint64_t>(rank);
    return {std::min(elements, r * each), std::min(elements, (r + 1) * each)};
  }
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "pagoda/pager/page.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::pager {

/// An operator that reads some rows of a page and no other bytes of it: an embedding.
struct Lookup {
  Page* page = nullptr;
  std::uint64_t first = 0;  // element of the page at which row 0 begins
  std::uint64_t width = 0;  // elements of a row
  std::uint64_t count = 0;  // rows read; those that are read twice count twice
  /// Which rows. Costs a wait for the device; asked for only where it must be known.
  std::function<std::vector<std::int64_t>()> rows;
};

/// The elements of these rows, in ascending order, neighbours in one. Rows that the page does not
/// have are left out: the operator itself complains of them.
std::vector<Range> elements_of(std::span<const std::int64_t> rows, const Lookup& lookup);

}  // namespace pagoda::pager

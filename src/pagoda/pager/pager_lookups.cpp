// SPDX-License-Identifier: Apache-2.0
// Pager: rows that are read where they lie ("Lookups" in docs/notes/paging.md).
#include <algorithm>
#include <utility>

#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/pager/lookup.h"
#include "pagoda/pager/pager.h"

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

bool Pager::begin_lookup(const Lookup& lookup, device::Stream* consumer) {
  Page& page = *lookup.page;
  // Where half of the page or more is read, all of it might as well come.
  if (options_.least_lookup == 0 || page.bytes() < options_.least_lookup || lookup.width == 0 ||
      2 * lookup.count * lookup.width > page.elements) {
    return false;
  }
  if (consumer != nullptr && consumer->capturing()) return false;
  Lock lock(mutex_);
  bury(lock);
  // Nor is an operator elsewhere about to bring it in, which would bind the storage.
  const bool in_place = page.residency == Residency::Absent && page.pins == page.lookups &&
                        page.home.tier() == Tier::Host && page.whole_home() && !page.own_copy &&
                        !page.blank;
  const Access access{&page, false};
  if (!in_place || page.fetch_error != nullptr || !refused_.empty() ||
      denied_to_others({&access, 1}, lock)) {
    return false;  // touch() knows what to do
  }
  // From here on home stays as and where it is, and the page out of the way of other operators.
  ++page.lookups;
  ++page.readers;
  ++page.pins;
  Debts* debts = debts_;
  const bool owes = page.owes();
  const std::byte* rows = page.home.data();
  const std::uint64_t wanted = page.wanted;
  lock.unlock();
  try {
    if (debts != nullptr && !debts->settles_parts(page, wanted)) {
      leave_lookup(page);
      return false;
    }
    if (owes) {
      const Stopwatch watch;
      PAGODA_TRACE("pager", "wait for update", {"page", page.name}, {"rows", lookup.count});
      rows = debts->settle_parts(page, elements_of(lookup.rows(), lookup));
      const Lock relock(mutex_);
      stats_.update_stall += watch.elapsed_ns();
      stalled_ += watch.elapsed_ns();
    }
  } catch (...) {
    leave_lookup(page);
    throw;
  }
  lock.lock();
  ++stats_.lookups;
  stats_.host_to_device += lookup.count * lookup.width * page.element_size;
  if (!page.bound && page.binding != nullptr) {
    page.binding->bind(const_cast<std::byte*>(rows));
    page.bound = true;
  }
  return true;
}

void Pager::end_lookup(Page& page, device::Stream* consumer) noexcept {
  if (consumer != nullptr) {
    const Lock lock(mutex_);
    device::Mark mark = mark_or_wait(*consumer, lock);
    if (mark.event != nullptr) note_reading(page, std::move(mark), lock);
  }
  leave_lookup(page);
}

void Pager::leave_lookup(Page& page) noexcept {
  const Lock lock(mutex_);
  --page.readers;
  --page.pins;
  recount(page, lock);
  if (--page.lookups == 0 && page.bound) unbind(page, lock);
  changed_.notify_all();
}

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/oracle.h"

#include <algorithm>

namespace pagoda::prefetch {

void Oracle::touched(pager::PageId page, std::uint8_t mode, Nanos now) {
  predictor_.touch({page, mode}, now);
  now_ = now;
}

void Oracle::stalled(Nanos wait) {
  predictor_.stalled(wait);
}

void Oracle::forget(pager::PageId page) {
  predictor_.forget(page);
  first_absent_ = 0;
}

void Oracle::absent(pager::PageId page) {
  if (const auto use = predictor_.next_use(page)) {
    first_absent_ = std::min(first_absent_, predictor_.position() + *use);
  }
}

/// The first of the expected touches whose page is absent; their number if none is. Goes on where
/// it was last time, so that a long way to it is not gone for every fetch.
std::size_t Oracle::find_absent(const pager::Occupancy& occupancy) {
  if (looked_after_ != predictor_.surprises()) first_absent_ = 0;
  looked_after_ = predictor_.surprises();
  const std::uint64_t next = predictor_.position() + 1;
  std::size_t i = first_absent_ > next ? static_cast<std::size_t>(first_absent_ - next) : 0;
  while (i < predictor_.size() &&
         occupancy.page(predictor_.page_ahead(i)).where != pager::Outlook::Where::Absent) {
    ++i;
  }
  first_absent_ = next + i;
  return i;
}

void Oracle::fetched(Bytes bytes, double seconds) {
  rate_.add(bytes, seconds);
  quiet_ = {};
}

pager::PageId Oracle::next_fetch(const pager::Occupancy& occupancy) {
  if (quiet_.changes == occupancy.changes() && quiet_.surprises == predictor_.surprises() &&
      predictor_.position() < quiet_.position && now_ < quiet_.time) {
    return pager::kNoPage;
  }
  const std::size_t first = find_absent(occupancy);
  if (first >= predictor_.size()) return pager::kNoPage;
  const PageId page = predictor_.page_ahead(first);
  // Where none that is used sooner may claim the room.
  if (occupancy.awaiting_update() == 0 && occupancy.page(page).bytes <= occupancy.free()) {
    return page;
  }
  Schedule::Pause pause;
  if (const auto next = Schedule(predictor_, occupancy, rate_).next_fetch(&pause)) {
    quiet_ = {};
    return *next;
  }
  quiet_ = {occupancy.changes(), predictor_.surprises(), predictor_.position() + pause.touches,
            now_ + pause.time};
  return pager::kNoPage;
}

pager::PageId Oracle::victim(const pager::Occupancy& occupancy, pager::PageId for_page,
                             bool may_be_dirty) {
  const auto goes = Schedule(predictor_, occupancy, rate_).choose_victim({}, may_be_dirty);
  if (!goes) return pager::kNoPage;
  if (for_page != pager::kNoPage && next_use(*goes) <= next_use(for_page)) return pager::kNoPage;
  return *goes;
}

}  // namespace pagoda::prefetch

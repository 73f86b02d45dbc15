// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/schedule.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace pagoda::prefetch {

using pager::Outlook;
using Where = Outlook::Where;

std::optional<PageId> Schedule::next_fetch(Pause* pause) const {
  // Looking again after a sixteenth of what was looked at makes it cheap for every touch, and is
  // soon enough to use what was free until then.
  constexpr std::size_t kShare = 16;
  Bytes free = arena_.free();              // less what pending pages before that take
  Bytes room = free + arena_.evictable();  // less what is used before the page looked at
  Bytes due = 0;                           // bytes that must arrive until then
  std::optional<PageId> next;
  std::size_t next_at = predictor_.size();
  double left = 60;  // seconds until something is due
  std::size_t i = 0;
  for (; i < predictor_.size(); ++i) {
    const Expected expected = predictor_.ahead(i);
    const PageId id = expected.touch.page;
    if (predictor_.next_use(id) != i + 1) continue;  // seen nearer
    const Outlook page = arena_.page(id);
    if (page.where == Where::Resident) {
      if (!page.in_use && !page.dirty) room -= std::min(room, page.bytes);
      continue;
    }
    due += page.bytes;
    if (page.where == Where::Absent || page.where == Where::Pending) {
      const bool pending = page.where == Where::Pending;
      if (!next && !pending && page.bytes <= free) return id;
      // All that is used until here does not fit at once: what comes later cannot be due now.
      if (page.bytes > room) break;
      room -= page.bytes;
      if (pending) {
        free -= std::min(free, page.bytes);
      } else if (!next) {
        next = id;
        next_at = i;
      }
    }
    if (!next) continue;
    // A later page may be what makes the next one urgent: fetches follow each other.
    const double until = static_cast<double>(expected.in - predictor_.ahead(0).in) * 1e-9;
    const double slack = until - options_.slack * rate_.seconds(due);
    if (slack <= 0) return next;
    left = std::min(left, slack);
    // Whatever else finds room until then cannot be due before.
    if (until > options_.slack * rate_.seconds(due + room)) break;
  }
  if (pause != nullptr) {
    pause->touches = std::max<std::size_t>(1, std::min(next_at / 2, i / kShare));
    pause->time = static_cast<Nanos>(left * 1e9 / 2);  // operators may be faster than expected
  }
  return std::nullopt;
}

std::optional<PageId> Schedule::choose_victim(std::span<const PageId> exclude,
                                              bool may_be_dirty) const {
  constexpr auto kFar = std::numeric_limits<std::uint64_t>::max();
  std::optional<PageId> victim;
  std::tuple<std::uint64_t, std::uint64_t> furthest{0, 0};  // touches until used, touches since
  for (const PageId id : arena_.resident()) {
    const std::tuple<std::uint64_t, std::uint64_t> rank{predictor_.next_use(id).value_or(kFar),
                                                        predictor_.last_use(id).value_or(kFar)};
    if (victim && rank <= furthest) continue;
    const Outlook page = arena_.page(id);
    if (page.where != Where::Resident || page.in_use || (page.dirty && !may_be_dirty)) continue;
    if (std::find(exclude.begin(), exclude.end(), id) != exclude.end()) continue;
    victim = id;
    furthest = rank;
  }
  return victim;
}

}  // namespace pagoda::prefetch

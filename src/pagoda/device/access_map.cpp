// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/access_map.h"

#include <algorithm>
#include <iterator>

namespace pagoda::device {

void AccessMap::split(std::uintptr_t at) {
  auto it = segments_.lower_bound(at);
  if (it == segments_.begin()) return;
  it = std::prev(it);
  if (it->second.end <= at) return;
  Segment rest = it->second;
  it->second.end = at;
  segments_.emplace(at, std::move(rest));
}

std::optional<Conflict> AccessMap::read(std::uintptr_t begin, std::uintptr_t end,
                                        const Access& access, const Ordered& ordered) {
  split(begin);
  split(end);
  std::optional<Conflict> conflict;
  std::uintptr_t at = begin;
  auto it = segments_.lower_bound(begin);
  while (at < end) {
    if (it == segments_.end() || it->first > at) {  // bytes nobody used so far
      const std::uintptr_t next = it == segments_.end() ? end : std::min(end, it->first);
      segments_.emplace_hint(it, at, Segment{next, std::nullopt, {access}});
      at = next;
      continue;
    }
    Segment& segment = it->second;
    if (!conflict && segment.write && !ordered(*segment.write)) {
      conflict = Conflict{*segment.write, true, it->first, segment.end};
    }
    const auto mine = std::ranges::find(segment.reads, access.actor, &Access::actor);
    if (mine == segment.reads.end()) {
      segment.reads.push_back(access);
    } else {
      *mine = access;
    }
    at = segment.end;
    ++it;
  }
  return conflict;
}

std::optional<Conflict> AccessMap::write(std::uintptr_t begin, std::uintptr_t end,
                                         const Access& access, const Ordered& ordered) {
  split(begin);
  split(end);
  std::optional<Conflict> conflict;
  const auto first = segments_.lower_bound(begin);
  auto it = first;
  for (; it != segments_.end() && it->first < end; ++it) {
    const Segment& segment = it->second;
    if (conflict) continue;
    // Reads come after the write they saw, so an unordered one says more than that write.
    for (const Access& earlier : segment.reads) {
      if (!ordered(earlier)) conflict = Conflict{earlier, false, it->first, segment.end};
    }
    if (!conflict && segment.write && !ordered(*segment.write)) {
      conflict = Conflict{*segment.write, true, it->first, segment.end};
    }
  }
  segments_.erase(first, it);
  segments_.emplace(begin, Segment{end, access, {}});
  return conflict;
}

}  // namespace pagoda::device

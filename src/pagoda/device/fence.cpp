// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/fence.h"

#include <algorithm>
#include <iterator>

#include "pagoda/base/error.h"

namespace pagoda::device {
namespace {

constexpr std::size_t kManyFences = 16;

bool over(const Fence& fence) {
  try {
    return fence.mark.event->done();
  } catch (const Error&) {
    return false;  // a device that does not answer: keep the fence, whoever waits will hear why
  }
}

void put_streams_together(Fences& fences) {
  Fences kept;
  for (Fence& fence : fences) {
    const auto same = std::ranges::find_if(
        kept, [&](const Fence& other) { return other.mark.stream == fence.mark.stream; });
    if (same == kept.end()) {
      kept.push_back(std::move(fence));
      continue;
    }
    same->begin = std::min(same->begin, fence.begin);
    same->end = std::max(same->end, fence.end);
    if (fence.mark.position > same->mark.position) same->mark = std::move(fence.mark);
  }
  fences = std::move(kept);
}

}  // namespace

Fences fences_within(const Fences& fences, Bytes begin, Bytes end) {
  Fences found;
  for (const Fence& fence : fences) {
    if (fence.end <= begin || fence.begin >= end) continue;
    found.push_back({std::max(fence.begin, begin), std::min(fence.end, end), fence.mark});
  }
  return found;
}

void add_fences(Fences& fences, Fences more) {
  std::erase_if(fences, over);
  std::ranges::move(more, std::back_inserter(fences));
  if (fences.size() > kManyFences) put_streams_together(fences);
}

}  // namespace pagoda::device

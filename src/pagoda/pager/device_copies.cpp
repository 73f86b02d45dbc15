// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/device_copies.h"

#include <utility>
#include <vector>

#include "pagoda/pager/home_reads.h"

namespace pagoda::pager {

DeviceCopies::DeviceCopies(PageTable& table, Tiers& tiers, Bindings& bindings)
    : table_(table),
      tiers_(tiers),
      bindings_(bindings),
      stream_(tiers.device()->make_stream({.name = "room"})) {}

bool DeviceCopies::try_take(PageRecord& page, const Lock& /*lock*/) {
  auto block = tiers_.arena().try_allocate(page.bytes(), *stream_, page.name());
  if (!block) return false;
  page.block = std::move(*block);
  page.ready = stream_->mark();
  return true;
}

void DeviceCopies::reuse(PageRecord& page, const Lock& lock) {
  // What read home to fill it before may still be at it, and kernels at what came.
  if (page.ready.event != nullptr) home_reads::note(page, std::move(page.ready), lock);
  std::vector<device::Mark> taken;
  page.block.mark_users(taken);
  page.block.wait_for_users(*stream_);
  page.ready = stream_->mark();
}

void DeviceCopies::drop(PageRecord& page, const Lock& lock) {
  if (page.residency != Residency::Resident || page.fixed) return;
  bindings_.unbind(page, lock);
  page.block = {};
  if (page.ready.event != nullptr) home_reads::note(page, std::move(page.ready), lock);
  page.ready = {};
  page.clean();
  table_.set_residency(page, Residency::Absent, lock);
  PagerStats& stats = table_.stats(lock);
  ++stats.evictions;
  if (page.prefetched) ++stats.wasted_prefetches;
  page.prefetched = false;
}

}  // namespace pagoda::pager

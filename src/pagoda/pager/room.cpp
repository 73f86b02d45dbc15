// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/room.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/pager/thread_pins.h"

namespace pagoda::pager {
namespace {

bool among(const PageRecord& page, std::span<const Access> accesses) {
  return std::any_of(accesses.begin(), accesses.end(),
                     [&](const Access& access) { return access.page == &page; });
}

}  // namespace

PageRecord* Room::victim(PageId for_page, bool may_be_dirty, const Lock& lock) {
  if (Foresight* foresight = table_.foresight(lock)) {
    const PageId id = foresight->victim(table_, for_page, may_be_dirty);
    return id == kNoPage ? nullptr : table_.pages(lock)[id];
  }
  PageRecord* oldest = nullptr;
  for (PageRecord* page : table_.pages(lock)) {
    if (page == nullptr || !page->evictable(may_be_dirty)) continue;
    if (oldest == nullptr || page->last_touch < oldest->last_touch) oldest = page;
  }
  return oldest;
}

void Room::fetch_ahead(const Lock& lock) {
  Foresight* foresight = table_.foresight(lock);
  if (!table_.any_absent(lock) || foresight == nullptr || starved_ > 0 ||
      !bindings_.refused(lock).empty()) {
    return;
  }
  while (fetcher_.has_capacity(lock)) {
    const PageId id = foresight->next_fetch(table_);
    if (id == kNoPage) return;
    PageRecord& page = *table_.pages(lock)[id];
    if (page.residency != Residency::Absent || page.awaits_update() || page.blank()) return;
    if (page.failed()) return;  // whoever touches it shall see that first
    while (!copies_.try_take(page, lock)) {
      PageRecord* goes = victim(id, false, lock);
      if (goes == nullptr) return;
      copies_.drop(*goes, lock);
    }
    page.prefetched = true;
    ++table_.stats(lock).prefetches;
    fetcher_.start_ahead(page, lock);
  }
}

void Room::wait_for_room(Lock& lock) {
  ++starved_;
  table_.wait_lending(lock);
  --starved_;
}

void Room::notify_unpinned(const Lock& /*lock*/) noexcept {
  if (starved_ > 0) table_.notify();
}

bool Room::bring(std::span<const Access> accesses, Lock& lock) {
  for (const Access& access : accesses) {
    PageRecord& page = record_of(*access.page);
    // step() has come while the lock was open: the update first, then all over again.
    if (page.has_pending_update() || page.outdated()) continue;
    if (page.residency == Residency::Resident && !page.current()) {
      // Its pointer is in use, by a hold or an operator of another thread: the new bytes come to
      // the same place. (One of the pins is that of who wants it.)
      if (page.holds > 0 || page.pins > 1) {
        copies_.reuse(page, lock);
        fetcher_.start(page, Priority::Urgent, lock);
        continue;
      }
      copies_.drop(page, lock);
    }
    if (page.residency != Residency::Absent) continue;
    // What befell a prefetch befalls whoever needs the page: no error is lost.
    if (page.failed()) {
      std::rethrow_exception(std::exchange(page.fetch_error, nullptr));
    }
    if (!take(page, accesses, lock)) return false;
    if (page.residency != Residency::Absent || !page.block) continue;  // all were laid out afresh
    ++table_.stats(lock).faults;
    fetcher_.start(page, Priority::Urgent, lock);
  }
  return true;
}

bool Room::take(PageRecord& page, std::span<const Access> accesses, Lock& lock) {
  for (;;) {
    // Changed while the lock was open.
    if (page.residency != Residency::Absent || page.has_pending_update()) return true;
    if (copies_.try_take(page, lock)) return true;
    if (PageRecord* goes = victim(kNoPage, true, lock)) {
      if (goes->dirty()) {
        homes_.write_back(*goes, lock);
      } else {
        copies_.drop(*goes, lock);
      }
      continue;
    }
    if (others_will_free(accesses, lock)) return false;
    if (take_afresh(accesses, lock)) return true;
  }
}

/// Whether waiting makes sense: pages on their way in or out, or pinned by operators elsewhere, but
/// for those that wait themselves.
bool Room::others_will_free(std::span<const Access> accesses, const Lock& lock) const {
  const auto pages = table_.pages(lock);
  return std::any_of(pages.begin(), pages.end(), [&](const PageRecord* page) {
    if (page == nullptr) return false;
    const bool ours = among(*page, accesses);
    if (page->residency == Residency::Leaving) return true;
    if (page->residency == Residency::Fetching) return !ours;
    return page->pins > page->holds + page->lent + thread_pins::count(*page) + (ours ? 1 : 0);
  });
}

/// The arena holds nothing but this operator's own pages, and yet one does not fit: crumbs. All go
/// out and come in again, largest first, without gaps. False: something else has come meanwhile.
bool Room::take_afresh(std::span<const Access> accesses, Lock& lock) {
  ++starved_;  // nothing is fetched ahead into the room that this makes
  try {
    for (bool done = false; !done;) {
      done = true;
      for (const Access& access : accesses) {
        PageRecord& page = record_of(*access.page);
        // Those of this operator that are on their way must arrive before they can move.
        if (page.moving()) {
          table_.wait(lock);
          done = false;
        } else if (page.residency == Residency::Resident && page.pins == 1 && !page.fixed) {
          if (page.dirty()) {
            homes_.write_back(page, lock);
            done = false;
          } else {
            copies_.drop(page, lock);
          }
        }
      }
    }
  } catch (...) {
    --starved_;
    throw;
  }
  --starved_;
  std::vector<PageRecord*> absent;
  for (const Access& access : accesses) {
    PageRecord& page = record_of(*access.page);
    if (page.residency == Residency::Absent && !page.has_pending_update()) absent.push_back(&page);
  }
  std::sort(absent.begin(), absent.end(),
            [](const PageRecord* a, const PageRecord* b) { return a->bytes() > b->bytes(); });
  for (PageRecord* page : absent) {
    if (copies_.try_take(*page, lock)) continue;
    for (PageRecord* taken : absent) {
      taken->block = {};
      taken->ready = {};
    }
    const auto pages = table_.pages(lock);
    const bool came = std::any_of(pages.begin(), pages.end(), [](const PageRecord* other) {
      return other != nullptr && other->evictable(true);
    });
    if (came || others_will_free(accesses, lock)) return false;
    too_large(accesses, lock);
  }
  for (PageRecord* page : absent) {
    ++table_.stats(lock).faults;
    fetcher_.start(*page, Priority::Urgent, lock);
  }
  return true;
}

void Room::too_large(std::span<const Access> accesses, const Lock& /*lock*/) const {
  std::vector<const PageRecord*> pages;
  for (const Access& access : accesses) {
    const PageRecord* page = &record_of(*access.page);
    if (std::find(pages.begin(), pages.end(), page) == pages.end()) pages.push_back(page);
  }
  std::stable_sort(pages.begin(), pages.end(), [](const PageRecord* a, const PageRecord* b) {
    return a->bytes() > b->bytes();
  });
  const device::ArenaStats arena = tiers_.arena().stats();
  constexpr std::size_t kListed = 5;
  std::string list;
  Bytes sum = 0;
  Bytes blocks = 0;         // the same in whole blocks
  Bytes held = arena.used;  // by others: what is pinned or placed on the device
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const PageRecord& page = *pages[i];
    const Bytes taken = Tiers::device_bytes(page.bytes());
    sum += page.bytes();
    blocks += taken;
    if (page.residency != Residency::Absent) held -= std::min(held, taken);
    if (i >= kListed) continue;
    list +=
        fmt::format("{}{} ({})", list.empty() ? "" : ", ", page.name(), format_bytes(page.bytes()));
  }
  if (pages.size() > kListed) list += fmt::format(" and {} more", pages.size() - kListed);
  // Where the sum would fit, what is pinned lies in its way: behind it there is room for all.
  const Bytes needed = held + blocks > arena.capacity ? held + blocks : arena.capacity + blocks;
  throw OperatorTooLarge(fmt::format(
      "an operator needs {}{} of pages at once: {}; device_budget = {} has {} for pages{}: raise "
      "device_budget to at least {}",
      format_bytes(sum),
      blocks == sum
          ? ""
          : fmt::format(" ({} in blocks of {} B)", format_bytes(blocks), Tiers::kDeviceBlock),
      list, format_bytes(tiers_.options().device_budget), format_bytes(arena.capacity),
      held == 0 ? "" : fmt::format(", {} of it pinned or placed there", format_bytes(held)),
      format_bytes_up(Tiers::least_device_budget(tiers_.options(), needed))));
}

}  // namespace pagoda::pager

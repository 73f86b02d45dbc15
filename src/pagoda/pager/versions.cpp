// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/versions.h"

#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/comm/comm_error.h"
#include "pagoda/pager/home_reads.h"

namespace pagoda::pager {
namespace {

/// Another rank did not have the version asked for any more: a prefetch that came too late for its
/// step, which nobody needs.
bool refused_by_rank(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const comm::RemoteError&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// Whether the copy that is there comes, or is still to come, from what will be the page's home: it
/// and `next` change places.
bool fetched_from_next_home(const PageRecord& page) noexcept {
  return page.next != nullptr && page.residency == Residency::Resident && page.current() &&
         page.next->tier() == page.home.tier() && page.next->size() == page.home.size();
}

}  // namespace

std::vector<Page*> Versions::mark_pending(std::span<Page* const> pages) {
  std::vector<Page*> exposed;
  std::vector<device::Mark> taken;
  Lock lock = table_.lock();
  for (Page* page : pages) table_.add_pending_update(record_of(*page), lock);
  table_.notify();
  for (Page* pending : pages) {
    PageRecord& page = record_of(*pending);
    table_.wait(lock, [&] { return !page.moving() && page.readers == 0; });
    if (page.fetch_error != nullptr) {
      const std::exception_ptr error = std::exchange(page.fetch_error, nullptr);
      if (!refused_by_rank(error)) std::rethrow_exception(error);
    }
    if (fetched_from_next_home(page)) {
      home_reads::wait_for_earlier(page, lock);
    } else {
      home_reads::wait(page, lock);
    }
    // Kernels that were queued until now see what is there now; whoever applies the update waits.
    if (page.fixed) {
      page.home.block().mark_users(taken);
      if (!page.dirty()) page.before = {};  // of the version before, kept for a write that waits
    }
    // Nobody fetches from there any more: it may become home.
    table_.change_version(page, lock, [&] { page.next = nullptr; });
    if (page.residency != Residency::Resident) continue;
    if (page.current() && !page.fixed) continue;  // it was fetched ahead
    // What the user holds, or an operator of another thread reads just now, as with plain tensors.
    const auto is_viewed = [&] { return page.binding != nullptr && page.binding->has_views(); };
    if (page.pins > 0 || (page.fixed && (page.captured || is_viewed()))) {
      exposed.push_back(pending);
    } else if (page.fixed) {
      bindings_.unbind(page, lock);  // the next touch, which waits for the update, binds it again
    } else {
      copies_.drop(page, lock);
    }
  }
  return exposed;
}

void Versions::updated(PageRecord& page, std::uint64_t version) {
  const Lock lock = table_.lock();
  page.fill();
  if (page.fixed) page.resident_version = version;
  table_.set_version(page, version, lock);
  table_.notify();
  room_.fetch_ahead(lock);
}

void Versions::wait_for_version(const PageRecord& page) {
  Lock lock = table_.lock();
  table_.wait(lock, [&] { return !page.has_pending_update() || !bindings_.refused(lock).empty(); });
  if (page.has_pending_update()) bindings_.require_not_refused(lock);
}

bool Versions::supersede(PageRecord& page) {
  const Lock lock = table_.lock();
  if (page.has_writes() || page.before || page.holds > 0 || page.has_pending_update()) return false;
  table_.change_version(page, lock, [&] { page.superseded = true; });
  if (page.evictable(false)) copies_.drop(page, lock);
  return true;
}

void Versions::offer_next(PageRecord& page, const Home& next) {
  const Lock lock = table_.lock();
  if (!page.superseded || page.has_pending_update() || page.shared || page.fixed) return;
  table_.change_version(page, lock, [&] { page.next = &next; });
  table_.note_fetchable(page, lock);
  room_.fetch_ahead(lock);
}

void Versions::withdraw_next(PageRecord& page) {
  Lock lock = table_.lock();
  if (page.next == nullptr) return;
  table_.change_version(page, lock, [&] { page.next = nullptr; });
  table_.wait(lock, [&] { return !page.moving(); });
  if (page.residency != Residency::Resident || page.current()) return;
  copies_.drop(page, lock);
  home_reads::wait_ignoring_errors(page, lock);
}

void Versions::end_supersede(PageRecord& page) {
  withdraw_next(page);
  const Lock lock = table_.lock();
  table_.change_version(page, lock, [&] { page.superseded = false; });
  table_.note_fetchable(page, lock);
}

void Versions::exchange_home(PageRecord& page, Home& other) {
  const Lock lock = table_.lock();
  PAGODA_CHECK(page.has_pending_update() && !page.moving() && !page.fixed,
               "page {} is read while it is updated", page.name());
  PAGODA_CHECK(page.home.tier() == other.tier() && page.home.size() == other.size());
  std::swap(page.home, other);
}

std::uint64_t Versions::add_reader(PageRecord& page) {
  const Lock lock = table_.lock();
  ++page.readers;
  return page.wanted;
}

void Versions::remove_reader(PageRecord& page) noexcept {
  const Lock lock = table_.lock();
  if (--page.readers == 0) table_.notify();
}

}  // namespace pagoda::pager

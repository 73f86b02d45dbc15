// SPDX-License-Identifier: Apache-2.0
// Pager: what it has to do with updates and with readers of homes.
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/comm/comm_error.h"
#include "pagoda/pager/pager.h"

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

}  // namespace

std::vector<Page*> Pager::owe(std::span<Page* const> pages) {
  std::vector<Page*> exposed;
  Lock lock(mutex_);
  for (Page* page : pages) {
    if (!page->owes()) ++owing_;
    ++page->wanted;
  }
  for (Page* page : pages) {
    changed_.wait(lock, [&] { return !page->moving() && page->readers == 0; });
    if (page->fetch_error != nullptr) {
      const std::exception_ptr error = std::exchange(page->fetch_error, nullptr);
      if (!refused_by_rank(error)) std::rethrow_exception(error);
    }
    await_reads(*page, lock);
    if (page->residency != Residency::Resident) continue;
    PAGODA_CHECK_EQ(page->pins, page->holds,
                    "an operator still runs on a page that is updated (page {})", page->name);
    const bool viewed = page->fixed && page->binding != nullptr && page->binding->has_views();
    if (page->holds > 0 || viewed) {
      exposed.push_back(page);
    } else if (page->fixed) {
      unbind(*page, lock);  // the next touch, which waits for the update, binds it again
    } else {
      drop_copy(*page, lock);
    }
  }
  return exposed;
}

void Pager::refresh(std::span<Page* const> pages) {
  for (Page* page : pages) {
    const Access access{page, false};
    touch({&access, 1}, 0, nullptr);
    unpin({&access, 1}, nullptr);
    Lock lock(mutex_);
    if (page->holds > 0) keep_held(*page, lock);
  }
}

void Pager::bind_fixed() {
  const Lock lock(mutex_);
  for (Page* page : by_id_) {
    if (page != nullptr && page->fixed && !page->owes()) bind(*page, lock);
  }
}

void Pager::updated(Page& page, std::uint64_t version) {
  const Lock lock(mutex_);
  if (page.owes()) --owing_;
  page.version = version;
  if (page.owes()) ++owing_;
  page.blank = false;
  ++changes_;
  if (page.fixed) page.resident_version = version;
  if (foresight_ != nullptr && page.residency == Residency::Absent) foresight_->absent(page.id);
  changed_.notify_all();
  pump(lock);
}

bool Pager::supersede(Page& page) {
  const Lock lock(mutex_);
  const bool written = page.dirty || page.own_copy || page.before;
  if (written || page.holds > 0 || page.owes()) return false;
  page.superseded = true;
  if (page.evictable(false)) drop_copy(page, lock);
  return true;
}

void Pager::end_supersede(Page& page) {
  const Lock lock(mutex_);
  page.superseded = false;
  ++changes_;
}

void Pager::exchange_home(Page& page, Home& other) {
  const Lock lock(mutex_);
  PAGODA_CHECK(page.owes() && !page.moving() && !page.fixed, "page {} is read while it is updated",
               page.name);
  PAGODA_CHECK(page.home.tier() == other.tier() && page.home.size() == other.size());
  std::swap(page.home, other);
}

void Pager::await_version(const Page& page) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !page.owes() || !refused_.empty(); });
  if (page.owes()) throw EngineError(refused_);
}

std::uint64_t Pager::add_reader(Page& page) {
  const Lock lock(mutex_);
  ++page.readers;
  return page.wanted;
}

void Pager::remove_reader(Page& page) noexcept {
  const Lock lock(mutex_);
  if (--page.readers == 0) changed_.notify_all();
}

}  // namespace pagoda::pager

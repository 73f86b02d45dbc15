// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/pager.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"

namespace pagoda::pager {

Pager::Pager(Tiers& tiers, Options options)
    : tiers_(tiers),
      options_(std::move(options)),
      lanes_(options_.fetch_threads),
      room_stream_(tiers.device()->make_stream({.name = "room"})),
      write_stream_(tiers.device()->make_stream({.name = "pages out"})),
      fetchers_(options_.fetch_threads, "fetch") {
  unsigned number = 0;
  for (Lane& lane : lanes_) {
    lane.stream = tiers_.device()->make_stream({.name = fmt::format("pages in {}", number++)});
    if (tiers_.device()->kind() == device::DeviceKind::Host) continue;  // filled without it
    lane.staging = tiers_.host().allocate(options_.staging, tag::kStaging, "fetch staging");
  }
  write_staging_ = tiers_.host().allocate(options_.staging, tag::kStaging, "write-back staging");
}

void Pager::stop_fetching() noexcept {
  {
    const Lock lock(mutex_);
    if (refused_.empty()) refused_ = "the engine has ended";  // nor is anything fetched ahead
  }
  fetchers_.stop(ThreadPool::Stop::Cancel);
}

Pager::~Pager() {
  stop_fetching();
  Lock lock(mutex_);
  for (const auto& page : pages_) {
    if (page == nullptr) continue;
    if (page->bound) unbind(*page, lock);
    let_reads_end(*page, lock);
  }
}

void Pager::set_foresight(Foresight* foresight) {
  const Lock lock(mutex_);
  foresight_ = foresight;
}

void Pager::set_debts(Debts* debts) {
  const Lock lock(mutex_);
  debts_ = debts;
}

void Pager::set_remote(RemoteShards* remote) {
  const Lock lock(mutex_);
  remote_ = remote;
}

Page& Pager::adopt(std::string name, std::uint64_t elements, Bytes element_size,
                   Placement placement, const std::byte* bytes, device::Direction from) {
  Page* page = nullptr;
  {
    Lock lock(mutex_);
    bury(lock);
    const auto id = static_cast<PageId>(pages_.size());
    pages_.push_back(std::make_unique<Page>(id, std::move(name), elements, element_size));
    page = pages_.back().get();
    by_id_.push_back(page);
    ++absent_;
    const std::lock_guard graves(graveyard_mutex_);  // storage_died() cannot ask for memory
    if (graveyard_.capacity() < pages_.size()) graveyard_.reserve(2 * pages_.size());
  }
  try {
    page->home =
        tiers_.allocate(page->bytes(), placement == Placement::Device ? Placement::Auto : placement,
                        tag::kParameters, page->name);
    page->home_range = {0, elements};
    if (bytes != nullptr && page->bytes() > 0) {
      if (from == device::Direction::DeviceToHost) {
        const std::lock_guard writing(write_mutex_);
        store(*page, bytes);
      } else {
        tiers_.write(page->home, 0, {bytes, page->bytes()});
      }
      page->blank = false;
    }
  } catch (Error& error) {
    error.add_context(context("page", page->name));
    drop(*page);
    throw;
  } catch (...) {
    drop(*page);
    throw;
  }
  return *page;
}

void Pager::set_binding(Page& page, Binding* binding) {
  const Lock lock(mutex_);
  if (binding != nullptr) {  // whatever storage it had before: the page lives
    const std::lock_guard graves(graveyard_mutex_);
    std::erase(graveyard_, &page);
    page.dead = false;
  }
  page.binding = binding;
  unbind(page, lock);
}

void Pager::storage_died(Page& page) noexcept {
  const std::lock_guard lock(graveyard_mutex_);
  graveyard_.push_back(&page);
  any_dead_.store(true, std::memory_order_release);
}

void Pager::drop(Page& page) {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !page.moving() && page.readers == 0; });
    if (!home_is_read(page, lock)) break;
    let_reads_end(page, lock);  // the lock is open: it may be fetched ahead meanwhile
  }
  page.binding = nullptr;
  remove(page, lock);
}

void Pager::remove(Page& page, const Lock& lock) {
  set_residency(page, Residency::Absent, lock);
  --absent_;
  if (foresight_ != nullptr) foresight_->forget(page.id);
  const PageId id = page.id;
  by_id_[id] = nullptr;
  pages_[id].reset();
}

void Pager::set_residency(Page& page, Residency to, const Lock& lock) {
  if (page.residency == Residency::Absent) --absent_;
  if (page.residency == Residency::Resident) {
    by_id_[resident_.back()]->place = page.place;
    resident_[page.place] = resident_.back();
    resident_.pop_back();
  }
  page.residency = to;
  if (to == Residency::Absent) {
    ++absent_;
    if (foresight_ != nullptr) foresight_->absent(page.id);
  }
  if (to == Residency::Resident) {
    page.place = static_cast<std::uint32_t>(resident_.size());
    resident_.push_back(page.id);
  }
  ++changes_;
  recount(page, lock);
}

/// After a change of what Page::evictable() looks at.
void Pager::recount(Page& page, const Lock& /*lock*/) noexcept {
  const bool spare = page.evictable(false);
  if (spare == page.spare) return;
  page.spare = spare;
  spare_ = spare ? spare_ + page.bytes() : spare_ - page.bytes();
}

void Pager::bury_dead() {
  const Lock lock(mutex_);
  bury(lock);
}

void Pager::bury(const Lock& lock) {
  if (!any_dead_.load(std::memory_order_acquire)) return;
  const std::lock_guard graves(graveyard_mutex_);
  std::erase_if(graveyard_, [&](Page* page) {
    page->dead = true;
    page->binding = nullptr;
    page->bound = false;
    const bool busy = page->moving() || page->readers > 0 || page->pins > 0 || page->owes() ||
                      page->attached || home_is_read(*page, lock);
    if (busy) return false;
    log::debug("pager", "page dropped with its storage", {{"page", page->name}});
    remove(*page, lock);
    return true;
  });
  any_dead_.store(!graveyard_.empty(), std::memory_order_release);
}

Occupancy Pager::occupancy(const Lock& /*lock*/) {
  return {by_id_, resident_, tiers_.arena().stats().largest_free, spare_, owing_, changes_};
}

Page* Pager::victim(PageId for_page, bool may_be_dirty, const Lock& lock) {
  if (foresight_ != nullptr) {
    const PageId id = foresight_->victim(occupancy(lock), for_page, may_be_dirty);
    return id == kNoPage ? nullptr : by_id_[id];
  }
  Page* oldest = nullptr;
  for (Page* page : by_id_) {
    if (page == nullptr || !page->evictable(may_be_dirty)) continue;
    if (oldest == nullptr || page->last_touch < oldest->last_touch) oldest = page;
  }
  return oldest;
}

/// Starts what the foresight wants fetched ahead, as far as room can be made.
void Pager::pump(const Lock& lock) {
  if (absent_ == 0 || foresight_ == nullptr || starved_ > 0 || !refused_.empty()) return;
  while (fetching_ < 2 * options_.fetch_threads) {
    const PageId id = foresight_->next_fetch(occupancy(lock));
    if (id == kNoPage) return;
    Page& page = *by_id_[id];
    if (page.residency != Residency::Absent || page.awaited() || page.blank) return;
    if (page.fetch_error != nullptr) return;  // whoever touches it shall see that first
    while (!try_take_block(page, lock)) {
      Page* goes = victim(id, false, lock);
      if (goes == nullptr) return;
      drop_copy(*goes, lock);
    }
    page.prefetched = true;
    ++stats_.prefetches;
    start_fetch(page, Priority::Normal, lock);
  }
}

void Pager::refuse(std::string why) noexcept {
  const Lock lock(mutex_);
  refuse(std::move(why), lock);
}

void Pager::refuse(std::string why, const Lock& /*lock*/) noexcept {
  if (refused_.empty()) refused_ = std::move(why);
  changed_.notify_all();
}

PagerStats Pager::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

Page* Pager::find(PageId id) const {
  const Lock lock(mutex_);
  return id < by_id_.size() ? by_id_[id] : nullptr;
}

std::vector<Page*> Pager::pages() const {
  const Lock lock(mutex_);
  return by_id_;
}

/// Forgets the resident copy; home has the bytes, or nobody wants these any more.
void Pager::drop_copy(Page& page, const Lock& lock) {
  if (page.residency != Residency::Resident || page.fixed) return;
  unbind(page, lock);
  page.block = {};
  if (page.ready.event != nullptr) note_reading(page, std::move(page.ready), lock);
  page.ready = {};
  page.dirty = false;
  set_residency(page, Residency::Absent, lock);
  ++stats_.evictions;
  if (page.prefetched) ++stats_.wasted_prefetches;
  page.prefetched = false;
}

void Pager::bind(Page& page, const Lock& /*lock*/) {
  if (page.bound || page.binding == nullptr) return;
  page.binding->bind(page.device_block().data());
  page.bound = true;
}

/// Where the engine has failed an access says why: an operator whose touch threw may be on its way
/// to it, while a fetch of the same page fails as well.
void Pager::unbind(Page& page, const Lock& /*lock*/) {
  page.bound = false;
  if (page.binding == nullptr) return;
  const auto denied = std::find_if(denials_.begin(), denials_.end(),
                                   [&](const Denial& denial) { return denial.page == &page; });
  if (denied != denials_.end()) {
    page.binding->unbind(denied->why);
    return;
  }
  const std::string_view why = page.owes() ? "has a pending update" : "is not on the device";
  page.binding->unbind(
      refused_.empty() ? fmt::format("page '{}' {}: nothing announced that it would be read; {}",
                                     page.name, why, options_.pin_advice)
                       : refused_);
}

}  // namespace pagoda::pager

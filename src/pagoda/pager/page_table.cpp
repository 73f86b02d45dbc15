// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/page_table.h"

#include <utility>

#include "pagoda/pager/thread_pins.h"

namespace pagoda::pager {

PageRecord& PageTable::add(std::string name, std::uint64_t elements, Bytes element_size,
                           const Lock& /*lock*/) {
  const auto id = static_cast<PageId>(pages_.size());
  pages_.push_back(std::make_unique<PageRecord>(id, std::move(name), elements, element_size));
  by_id_.push_back(pages_.back().get());
  ++absent_;
  dead_pages_.make_room(pages_.size());
  return *pages_.back();
}

void PageTable::remove(PageRecord& page, const Lock& lock) {
  set_residency(page, Residency::Absent, lock);
  --absent_;
  if (page.awaits_update()) --awaiting_;
  if (foresight_ != nullptr) foresight_->forget(page.id);
  const PageId id = page.id;
  by_id_[id] = nullptr;
  pages_[id].reset();
}

void PageTable::set_residency(PageRecord& page, Residency to, const Lock& lock) {
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

void PageTable::pin(PageRecord& page, const Lock& lock) noexcept {
  ++page.pins;
  recount(page, lock);
}

void PageTable::unpin(PageRecord& page, const Lock& lock) noexcept {
  --page.pins;
  recount(page, lock);
  notify_pin_waiters(lock);
}

void PageTable::wait_lending(Lock& lock) {
  lend(lock);
  changed_.wait(lock);
  take_back(lock);
}

void PageTable::lend(const Lock& lock) noexcept {
  for (const Page* page : thread_pins::all()) {
    if (PageRecord* record = mine(*page)) ++record->lent;
  }
  notify_pin_waiters(lock);
}

void PageTable::take_back(const Lock& /*lock*/) noexcept {
  for (const Page* page : thread_pins::all()) {
    if (PageRecord* record = mine(*page)) --record->lent;
  }
}

/// A thread's operators may have pages of several pagers.
PageRecord* PageTable::mine(const Page& page) const noexcept {
  return page.id < by_id_.size() && by_id_[page.id] == &page ? by_id_[page.id] : nullptr;
}

void PageTable::recount(PageRecord& page, const Lock& /*lock*/) noexcept {
  const bool spare = page.evictable(false);
  if (spare == page.spare) return;
  page.spare = spare;
  spare_ = spare ? spare_ + page.bytes() : spare_ - page.bytes();
}

void PageTable::add_pending_update(PageRecord& page, const Lock& lock) noexcept {
  change_version(page, lock, [&] { ++page.wanted; });
}

void PageTable::set_version(PageRecord& page, std::uint64_t version, const Lock& lock) {
  change_version(page, lock, [&] { page.version = version; });
  note_fetchable(page, lock);
}

void PageTable::note_fetchable(const PageRecord& page, const Lock& /*lock*/) {
  ++changes_;
  if (foresight_ != nullptr && page.residency == Residency::Absent) foresight_->absent(page.id);
}

Outlook PageTable::page(PageId id) const {
  using Where = Outlook::Where;
  const PageRecord* page = id < by_id_.size() ? by_id_[id] : nullptr;
  if (page == nullptr) return {};
  Outlook out{page->bytes(), Where::Resident, page->pins > 0 || page->fixed, page->dirty()};
  switch (page->residency) {
    case Residency::Absent:
      out.where = page->blank() || page->dead ? Where::Nowhere
                  : page->awaits_update()     ? Where::Pending
                                              : Where::Absent;
      break;
    case Residency::Fetching:
    case Residency::Leaving:
      out.where = Where::Moving;
      break;
    case Residency::Resident:
      break;
  }
  return out;
}

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/pager.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/pager/holds.h"
#include "pagoda/pager/home_reads.h"
#include "pagoda/pager/thread_pins.h"
#include "pagoda/pager/touches.h"
#include "pagoda/pager/versions.h"

namespace pagoda::pager {

using Lock = PageTable::Lock;

/// One noun each; later ones use earlier ones.
struct Pager::Parts {
  Parts(Tiers& tiers, const Options& options)
      : table(tiers),
        bindings(options.pin_advice),
        copies(table, tiers, bindings),
        homes(table, tiers, options, copies),
        fetcher(table, tiers, options, copies,
                [this](const Lock& lock) { room.fetch_ahead(lock); }),
        room(table, tiers, bindings, copies, homes, fetcher),
        holds(table, tiers, bindings, homes, copies),
        versions(table, bindings, copies, room),
        touches(table, tiers, options, bindings, copies, homes, fetcher, room) {}

  /// No operator of another thread has the page, or is denied it.
  bool unused(const PageRecord& page, const Lock& lock) const {
    return page.pins <= page.holds + thread_pins::count(page) && !bindings.denies(page, lock);
  }

  PageTable table;
  Bindings bindings;
  DeviceCopies copies;
  Homes homes;
  Fetcher fetcher;
  Room room;
  Holds holds;
  Versions versions;
  Touches touches;
};

Bytes Pager::bookkeeping() noexcept {
  return sizeof(PageRecord);
}

Pager::Pager(Tiers& tiers, Options options)
    : tiers_(tiers),
      options_(std::move(options)),
      parts_(std::make_unique<Parts>(tiers_, options_)) {}

void Pager::stop_fetching() noexcept {
  {
    const Lock lock = parts_->table.lock();
    parts_->bindings.refuse("the engine has ended", lock);  // nor is anything fetched ahead
    parts_->table.notify();
  }
  parts_->fetcher.stop();
}

Pager::~Pager() {
  stop_fetching();
  Lock lock = parts_->table.lock();
  parts_->table.wait_for_pins(lock, [&] {
    const auto pages = parts_->table.pages(lock);
    return std::all_of(pages.begin(), pages.end(), [&](const PageRecord* page) {
      return page == nullptr || parts_->unused(*page, lock);
    });
  });
  for (PageRecord* page : parts_->table.pages(lock)) {
    if (page == nullptr) continue;
    if (page->exposure != Exposure::None) parts_->bindings.unbind(*page, lock);
    home_reads::wait_ignoring_errors(*page, lock);
  }
}

void Pager::set_foresight(Foresight* foresight) {
  parts_->table.set_foresight(foresight, parts_->table.lock());
}

void Pager::set_pending_updates(PendingUpdates* updates) {
  parts_->homes.set_pending_updates(updates, parts_->table.lock());
}

void Pager::set_remote(RemoteShards* remote) {
  parts_->fetcher.set_remote(remote, parts_->table.lock());
}

// Pages.

Page& Pager::adopt(std::string name, std::uint64_t elements, Bytes element_size,
                   Placement placement, const std::byte* bytes, device::Direction from) {
  PageRecord* page = nullptr;
  {
    const Lock lock = parts_->table.lock();
    parts_->touches.drop_dead_pages(lock);
    page = &parts_->table.add(std::move(name), elements, element_size, lock);
  }
  try {
    parts_->homes.create(*page, placement, bytes, from);
  } catch (Error& error) {
    error.add_context(context("page", page->name()));
    drop(*page);
    throw;
  } catch (...) {
    drop(*page);
    throw;
  }
  return *page;
}

void Pager::rename(Page& page, std::string name) {
  const Lock lock = parts_->table.lock();
  if (page.name() == name) return;
  record_of(page).rename(std::move(name));
  parts_->bindings.changed(record_of(page), lock);
}

void Pager::set_binding(Page& page, Binding* binding) {
  PageRecord& record = record_of(page);
  const Lock lock = parts_->table.lock();
  if (binding != nullptr) {  // whatever storage it had before: the page lives
    parts_->table.dead_pages().forget(record);
    record.dead = false;
  }
  record.binding = binding;
  record.exposure = Exposure::None;
  parts_->bindings.changed(record, lock);
}

void Pager::set_attached(Page& page, bool attached) {
  const Lock lock = parts_->table.lock();
  record_of(page).attached = attached;
}

void Pager::storage_died(Page& page) noexcept {
  parts_->table.dead_pages().add(record_of(page));
}

void Pager::drop_dead_pages() {
  parts_->touches.drop_dead_pages(parts_->table.lock());
}

void Pager::drop(Page& page) {
  PageRecord& record = record_of(page);
  Lock lock = parts_->table.lock();
  for (;;) {
    parts_->table.wait(lock, [&] { return !record.moving() && record.readers == 0; });
    if (!parts_->unused(record, lock)) {
      parts_->table.wait_for_pins(lock, [&] { return parts_->unused(record, lock); });
      continue;
    }
    if (!home_reads::any(record, lock)) break;
    home_reads::wait_ignoring_errors(record,
                                     lock);  // the lock is open: it may be fetched ahead meanwhile
  }
  record.binding = nullptr;
  parts_->table.dead_pages().forget(record);
  parts_->table.remove(record, lock);
}

// Operators.

Pin Pager::touch(std::span<const Access> accesses, std::uint8_t mode, device::Stream* consumer) {
  parts_->touches.touch(accesses, mode, consumer);
  return {*this, accesses, consumer};
}

void Pager::unpin(std::span<const Access> accesses, device::Stream* consumer) noexcept {
  parts_->touches.unpin(accesses, consumer);
}

Hold Pager::hold(Page& page, device::Stream* consumer, bool write, RawWrites writes) {
  const Access access{&page, write};
  Pin pin = touch({&access, 1}, 0, consumer);
  if (consumer != nullptr) parts_->touches.wait_for_copies({&access, 1});  // for any stream
  wait_until_writable(page);
  Lock lock = parts_->table.lock();
  parts_->holds.add(record_of(page), write, writes, lock);
  thread_pins::forget(page);  // touch() has just put it there; any thread may let go of a hold
  pin.forget();
  Hold hold{*this, page};
  // No operator has it any more: whoever waits for that, or for room, looks again.
  parts_->table.notify();
  parts_->table.notify_pin_waiters(lock);
  const bool in_place = record_of(page).fixed;
  lock.unlock();
  // From here on no early update begins; of a page that has one copy only, one that had begun reads
  // what the pointer may write to.
  if (in_place) wait_until_writable(page);
  return hold;
}

void Pager::wait_until_writable(Page& page) {
  PendingUpdates* updates = parts_->homes.pending_updates(parts_->table.lock());
  if (updates != nullptr) updates->about_to_hold(page);
}

void Pager::release_hold(Page& page) noexcept {
  Lock lock = parts_->table.lock();
  PageRecord& record = record_of(page);
  parts_->holds.remove(record, lock);
  record.user_wrote = record.user_wrote || record.dirty();
  parts_->bindings.unpinned(record, lock);
  parts_->room.notify_unpinned(lock);
}

Pin Pager::look_up(const Lookup& lookup, device::Stream* consumer) {
  if (!parts_->touches.begin_lookup(lookup, consumer)) return {};
  return {*this, *lookup.page, consumer};
}

void Pager::end_lookup(Page& page, device::Stream* consumer) noexcept {
  parts_->touches.end_lookup(record_of(page), consumer);
}

bool Pager::pinned_by_this_thread(const Page& page) noexcept {
  return thread_pins::count(page) > 0;
}

bool Pager::any_pinned_by_this_thread() noexcept {
  return !thread_pins::all().empty();
}

void Pager::wait_until_unused(Page& page) {
  Lock lock = parts_->table.lock();
  parts_->table.wait_for_pins(lock, [&] { return parts_->unused(record_of(page), lock); });
}

Bytes Pager::needed(std::span<const Access> accesses) const {
  const Bytes alignment = device::ArenaOptions().alignment;
  const Lock lock = parts_->table.lock();
  Bytes sum = 0;
  for (const Access& access : accesses) {
    if (!record_of(*access.page).fixed) sum += align_up(access.page->bytes(), alignment);
  }
  return sum;
}

bool Pager::has_room_beside(const Page& page) const {
  const PageRecord& one = record_of(page);
  const Lock lock = parts_->table.lock();
  const device::ArenaStats arena = tiers_.arena().stats();
  Bytes lasting = arena.used;  // by what does not go for others
  const auto stays = [](const PageRecord& record) { return record.fixed || record.holds > 0; };
  for (const PageRecord* record : parts_->table.pages(lock)) {
    if (record == nullptr || stays(*record) || !record->block) continue;
    lasting -= std::min(lasting, Tiers::device_bytes(record->bytes()));
  }
  const Bytes bytes = Tiers::device_bytes(page.bytes());
  return lasting + (stays(one) ? bytes : 2 * bytes) <= arena.capacity;
}

bool Pager::is_unused(const Page& page) const {
  const PageRecord& record = record_of(page);
  const Lock lock = parts_->table.lock();
  return record.pins == 0 && !parts_->bindings.is_denied(record, lock);
}

void Pager::wait_for_writes(const Page& page) {
  parts_->homes.wait_for_writes(record_of(page), nullptr);
}

void Pager::deny(std::span<const Access> accesses, const std::string& why) noexcept {
  Lock lock = parts_->table.lock();
  parts_->bindings.announce_denial(accesses, why, lock);
  parts_->table.wait_for_pins(lock, [&] {
    return !parts_->bindings.denied_to_others(accesses, lock) &&
           std::none_of(accesses.begin(), accesses.end(),
                        [](const Access& access) { return record_of(*access.page).in_use(); });
  });
  parts_->bindings.deny(accesses, why, lock);
}

void Pager::allow(std::span<const Access> accesses) noexcept {
  const Lock lock = parts_->table.lock();
  parts_->bindings.allow(accesses, lock);
  parts_->table.notify();
  parts_->table.notify_pin_waiters(lock);
}

void Pager::refuse(std::string why) noexcept {
  const Lock lock = parts_->table.lock();
  parts_->bindings.refuse(std::move(why), lock);
  parts_->table.notify();
}

// Versions.

void Pager::note_user(device::Stream& stream) {
  const Lock lock = parts_->table.lock();
  for (const PageRecord* page : parts_->table.pages(lock)) {
    if (page == nullptr || (!page->fixed && page->holds == 0) || !page->device_block()) continue;
    page->device_block().touch(stream);
  }
}

std::vector<Page*> Pager::mark_pending(std::span<Page* const> pages) {
  return parts_->versions.mark_pending(pages);
}

void Pager::refresh(std::span<Page* const> pages) {
  for (Page* page : pages) {
    const Access access{page, false};
    touch({&access, 1}, 0, nullptr).release();
    wait_until_writable(*page);
    Lock lock = parts_->table.lock();
    if (record_of(*page).holds > 0) parts_->holds.keep(record_of(*page), lock);
  }
}

void Pager::bind_fixed() {
  const Lock lock = parts_->table.lock();
  for (PageRecord* page : parts_->table.pages(lock)) {
    if (page != nullptr && page->fixed && !page->has_pending_update())
      parts_->bindings.bind(*page, lock);
  }
}

void Pager::updated(Page& page, std::uint64_t version) {
  parts_->versions.updated(record_of(page), version);
}

void Pager::wait_for_version(const Page& page) {
  parts_->versions.wait_for_version(record_of(page));
}

bool Pager::supersede(Page& page) {
  return parts_->versions.supersede(record_of(page));
}

void Pager::end_supersede(Page& page) {
  parts_->versions.end_supersede(record_of(page));
}

void Pager::offer_next(Page& page, const Home& next) {
  parts_->versions.offer_next(record_of(page), next);
}

void Pager::withdraw_next(Page& page) {
  parts_->versions.withdraw_next(record_of(page));
}

void Pager::exchange_home(Page& page, Home& other) {
  parts_->versions.exchange_home(record_of(page), other);
}

HomeReader Pager::read(Page& page) {
  return {*this, page, parts_->versions.add_reader(record_of(page))};
}

void Pager::remove_reader(Page& page) noexcept {
  parts_->versions.remove_reader(record_of(page));
}

// Homes.

Home& Pager::home(Page& page) noexcept {
  return record_of(page).home;
}

const Home& Pager::home(const Page& page) noexcept {
  return record_of(page).home;
}

Range Pager::home_range(const Page& page) noexcept {
  return record_of(page).home_range;
}

void Pager::overwrite(Page& page, const std::byte* bytes) {
  const Access read{&page, false};
  const Pin there = touch({&read, 1}, 0, nullptr);
  const Access write{&page, true};
  const Pin pin = touch({&write, 1}, 0, &parts_->homes.stream_behind_users(record_of(page)));
  parts_->homes.copy_in(record_of(page), bytes);
}

void Pager::find_raw_writes() {
  Lock lock = parts_->table.lock();
  parts_->holds.find_writes(lock);
  for (PageRecord* page : parts_->table.pages(lock)) {
    if (page != nullptr && page->holds > 0 && page->dirty()) page->user_wrote = true;
  }
}

std::vector<bool> Pager::written_by_user(std::span<Page* const> pages) const {
  const Lock lock = parts_->table.lock();
  std::vector<bool> out;
  out.reserve(pages.size());
  for (const Page* page : pages) out.push_back(record_of(*page).user_wrote);
  return out;
}

void Pager::forget_user_writes(std::span<Page* const> pages) {
  const Lock lock = parts_->table.lock();
  for (Page* page : pages) record_of(*page).user_wrote = false;
}

std::uint64_t Pager::checksum(Page& page) {
  {
    // What was written and evicted is compared where it lies: nothing leaves the device for it.
    Lock lock = parts_->table.lock();
    PageRecord& record = record_of(page);
    parts_->table.wait(lock, [&] { return !record.moving(); });
    if (record.residency == Residency::Absent && record.own_copy) {
      lock.unlock();
      return parts_->homes.checksum(record, true);
    }
  }
  const Access access{&page, false};
  const Pin pin = touch({&access, 1}, 0, nullptr);
  return parts_->homes.checksum(record_of(page), false);
}

std::vector<std::string> Pager::take_reported_writes() {
  Lock lock = parts_->table.lock();
  return parts_->holds.take_reported(lock);
}

Pager::Written Pager::written() {
  const Lock lock = parts_->table.lock();
  parts_->touches.drop_dead_pages(lock);
  Written out;
  for (PageRecord* page : parts_->table.pages(lock)) {
    if (page == nullptr || !page->has_writes()) continue;
    out.pages.push_back(page);
    out.shared = out.shared || page->shared;
  }
  return out;
}

void Pager::write_back(Page& page) {
  parts_->homes.write_back(record_of(page));
}

bool Pager::evict(Page& page) {
  return parts_->homes.evict(record_of(page));
}

bool Pager::publish(Page& page) {
  PageRecord& record = record_of(page);
  parts_->homes.write_back(record);
  Lock lock = parts_->table.lock();
  parts_->table.wait(lock, [&] { return !record.moving() && record.readers == 0; });
  if (record.holds > 0) parts_->holds.keep(record, lock);
  return parts_->homes.publish(record, lock);
}

void Pager::set_home_range(Page& page, Range range, Placement placement) {
  parts_->homes.cut(record_of(page), range, placement);
}

void Pager::fix(Page& page) {
  PageRecord& record = record_of(page);
  const Access access{&page, false};
  const Pin pin = touch({&access, 1}, 0, nullptr);
  Lock lock = parts_->table.lock();
  PAGODA_CHECK(record.whole_home(), "a sharded page cannot stay whole on the device");
  if (record.fixed) return;
  parts_->table.wait(lock, [&] { return record.readers == 0; });
  home_reads::wait(record, lock);
  record.home = tiers_.as_home(std::move(record.block));
  record.fixed = true;
  parts_->bindings.changed(record, lock);
  record.clean();
}

void Pager::read_home(Page& page, Range elements, Bytes piece, const ReadPiece& read) {
  publish(page);
  parts_->homes.read(record_of(page), elements, piece, read);
}

void Pager::write_home(Page& page, Bytes piece, const WritePiece& write) {
  parts_->homes.write(record_of(page), piece, write);
}

void Pager::fill_blank(Page& page) {
  parts_->homes.fill_blank(record_of(page));
}

// What others may know.

PagerStats Pager::stats() const {
  const Lock lock = parts_->table.lock();
  return parts_->table.stats(lock);
}

PageSnapshot Pager::look(const Page& page) const {
  const PageRecord& record = record_of(page);
  const Lock lock = parts_->table.lock();
  return {record.residency,  record.contents, record.fixed,  record.home.tier(),
          record.home_range, record.version,  record.wanted, record.pins,
          record.holds,      record.readers,  record.lookups};
}

std::vector<std::size_t> Pager::next_uses(std::span<Page* const> pages) const {
  const Lock lock = parts_->table.lock();
  const Foresight* foresight = parts_->table.foresight(lock);
  std::vector<std::size_t> out;
  out.reserve(pages.size());
  for (const Page* page : pages) {
    out.push_back(foresight == nullptr ? std::numeric_limits<std::size_t>::max()
                                       : foresight->next_use(page->id));
  }
  return out;
}

// What others may have.

void Pin::release() noexcept {
  Pager* pager = std::exchange(pager_, nullptr);
  if (pager == nullptr) return;
  if (lookup_ != nullptr) {
    pager->end_lookup(*lookup_, consumer_);
  } else {
    pager->unpin(accesses_, consumer_);
  }
}

Hold::~Hold() {
  if (pager_ != nullptr) pager_->release_hold(*page_);
}

HomeReader::~HomeReader() {
  if (pager_ != nullptr) pager_->remove_reader(*page_);
}

const Home& HomeReader::home() const noexcept {
  return Pager::home(*page_);
}

Range HomeReader::range() const noexcept {
  return Pager::home_range(*page_);
}

}  // namespace pagoda::pager

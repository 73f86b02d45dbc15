// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/holds.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/io/checksum.h"

namespace pagoda::pager {

void Holds::add(PageRecord& page, bool write, RawWrites writes, Lock& lock) {
  if (!tiers_.device_is_host()) writes = RawWrites::Count;  // they are announced
  // No update of a page begins while it is held: writes count as when its first hold was made.
  if (page.holds == 0 && writes == RawWrites::Refuse) copy_bytes(page, lock);
  try {
    if (page.holds == 0) {
      if (!write) keep(page, lock);
    } else if (tiers_.device_is_host()) {
      (void)note_write(page, lock);  // by pointers of the holds before
    }
  } catch (...) {
    if (page.holds == 0) page.held.copy = {};
    throw;
  }
  if (page.holds == 0) page.held.writes = writes;
  ++page.holds;
  page.held.for_write = page.held.for_write || write;
}

void Holds::remove(PageRecord& page, Lock& lock) noexcept {
  bool stale = false;
  try {
    stale = note_write(page, lock);
  } catch (const std::exception& error) {  // no memory for its name, or no mark
    log::warn("pager", "a write under a pin is not reported",
              {{"page", page.name()}, {"cause", error.what()}});
  }
  --page.holds;
  table_.note_change(lock);
  if (page.holds == 0) {
    page.held.for_write = false;
    page.held.writes = RawWrites::Count;
    page.held.copy = {};
    if (!page.dirty()) page.before = {};
  }
  table_.unpin(page, lock);
  // Where an operator of another thread uses it, it goes with the next version.
  if (stale && page.evictable(false)) copies_.drop(page, lock);
}

/// For writes that are refused.
void Holds::copy_bytes(PageRecord& page, Lock& lock) {
  const auto arrived = page.ready.event;  // a held page may be getting another one
  lock.unlock();                          // it is pinned
  Home copy;
  try {
    copy = tiers_.allocate(page.bytes(), Placement::Host, tag::kParameters, page.name());
  } catch (const BudgetExceeded&) {
    lock.lock();
    if (page.fixed || page.dirty()) throw;
    return;  // its home has them, too
  }
  if (arrived != nullptr) arrived->wait();
  tiers_.write(copy, 0, {page.device_block().data(), page.bytes()});
  lock.lock();
  if (page.holds == 0) page.held.copy = std::move(copy);
}

void Holds::keep(PageRecord& page, Lock& lock) {
  if (tiers_.device_is_host()) {
    page.held.sum = io::checksum({page.device_block().data(), page.bytes()});
  } else if (!page.held.for_write) {
    return;
  }
  if (!page.dirty()) page.before = {};
  homes_.keep_before(page, lock);
}

/// False: the copy, which lies on disk where the host had no room, cannot be read. That is waited
/// for without the lock: the page is pinned.
bool Holds::put_back(PageRecord& page, Lock& lock) noexcept {
  Home copy = std::exchange(page.held.copy, {});
  lock.unlock();
  bool done = true;
  try {
    tiers_.read(copy, 0, {page.device_block().data(), page.bytes()});
  } catch (const std::exception& error) {
    log::warn("pager", "a write that is refused cannot be undone",
              {{"page", page.name()}, {"cause", error.what()}});
    done = false;
  }
  lock.lock();
  page.held.copy = std::move(copy);
  return done;
}

/// Whether the resident copy has bytes that must not be seen.
bool Holds::note_write(PageRecord& page, Lock& lock) {
  if (page.spoiled()) return true;
  bool written = page.held.for_write;
  if (tiers_.device_is_host()) {
    const std::span bytes(page.device_block().data(), page.bytes());
    const std::uint64_t sum = io::checksum(bytes);
    if (sum != page.held.sum && page.held.writes != RawWrites::Count &&
        std::find(reported_.begin(), reported_.end(), page.name()) == reported_.end()) {
      reported_.push_back(page.name());
    }
    if (sum != page.held.sum && page.held.writes == RawWrites::Refuse) {
      if (!page.held.copy) return true;
      if (put_back(page, lock)) return false;
    }
    written = written || sum != page.held.sum;
    page.held.sum = sum;
  }
  if (written) page.contents = Contents::Dirty;
  if (page.held.for_write) {  // by kernels that may not have run yet
    std::vector<device::Mark> taken;
    page.device_block().mark_users(taken);
  }
  return false;
}

/// By number: note_write() opens the lock, and a page may go meanwhile with its last hold.
template <class Visit>
void Holds::for_each_held(Lock& lock, const Visit& visit) {
  for (PageId id = 0; id < table_.pages(lock).size(); ++id) {
    PageRecord* page = table_.pages(lock)[id];
    if (page == nullptr || page->holds == 0) continue;
    table_.pin(*page, lock);  // it stays while it is looked at
    std::exception_ptr error;
    try {
      visit(*page);
    } catch (...) {
      error = std::current_exception();
    }
    table_.unpin(*page, lock);
    bindings_.unpinned(*page, lock);
    table_.notify();
    if (error != nullptr) std::rethrow_exception(error);
  }
}

void Holds::find_writes(Lock& lock) {
  for_each_held(lock, [&](PageRecord& page) {
    (void)note_write(page, lock);
    page.held.writes = RawWrites::Count;  // the step has begun
    page.held.copy = {};
  });
}

std::vector<std::string> Holds::take_reported(Lock& lock) {
  for_each_held(lock, [&](PageRecord& page) {
    if (page.held.writes != RawWrites::Count) (void)note_write(page, lock);
  });
  return std::exchange(reported_, {});
}

}  // namespace pagoda::pager

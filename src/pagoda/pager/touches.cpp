// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/touches.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/pager/home_reads.h"
#include "pagoda/pager/thread_pins.h"

namespace pagoda::pager {
namespace {

/// Whether the copy that brought the page in has failed: what is there is not the page.
bool failed_to_arrive(const PageRecord& page) {
  try {
    if (page.ready.event != nullptr && page.ready.event->done()) page.ready.event->wait();
    return false;
  } catch (...) {
    return true;
  }
}

}  // namespace

/// Waits for what a touch conflicts with, once: an operator that is about to throw, a lookup, a
/// pending update. False: there is nothing.
bool Touches::wait_for_conflict(std::span<const Access> accesses, Lock& lock) {
  if (bindings_.denied_to_others(accesses, lock)) {  // until that operator has thrown
    table_.wait_lending(lock, [&] { return !bindings_.denied_to_others(accesses, lock); });
    return true;
  }
  const auto pending = std::find_if(accesses.begin(), accesses.end(), [](const Access& access) {
    const PageRecord& page = record_of(*access.page);
    return page.has_pending_update() || page.lookups > 0 || page.outdated();
  });
  if (pending == accesses.end()) return false;
  PageRecord& page = record_of(*pending->page);
  if (page.lookups > 0) {  // another thread's operator has the storage, while it runs
    table_.wait(lock);
    return true;
  }
  if (page.outdated()) {
    wait_for_own_step(page, lock);
    return true;
  }
  PendingUpdates* updates = homes_.pending_updates(lock);
  PAGODA_CHECK(updates != nullptr, "nobody applies the pending update of page {}", page.name());
  PAGODA_TRACE("pager", "wait for update", {"page", page.name()});
  lock.unlock();
  const Stopwatch watch;
  updates->wait_for_update(page);
  lock.lock();
  note_stall(table_.stats(lock).update_stall, watch.elapsed_ns(), lock);
  return true;
}

/// Whether the operator may have what is there now.
bool Touches::complete(std::span<const Access> accesses, const Lock& /*lock*/) {
  return std::all_of(accesses.begin(), accesses.end(), [](const Access& access) {
    const PageRecord& page = record_of(*access.page);
    return page.residency == Residency::Resident && !page.has_pending_update() && page.current();
  });
}

/// Brings the pages, which are pinned, and waits for them; false: to be tried again, without pins.
bool Touches::bring(std::span<const Access> accesses, Lock& lock) {
  if (!room_.bring(accesses, lock)) {  // no room until another thread is done with its pages
    unpin_all(accesses, lock);
    room_.wait_for_room(lock);
    return false;
  }
  for (const Access& access : accesses) wait_for_page(record_of(*access.page), lock);
  if (complete(accesses, lock)) {
    for (const Access& access : accesses) {
      if (access.write) homes_.keep_before(record_of(*access.page), lock);
    }
  }
  // After the last wait: what was there may have changed while others were waited for.
  if (complete(accesses, lock)) return true;
  unpin_all(accesses, lock);
  return false;
}

void Touches::touch(std::span<const Access> accesses, std::uint8_t mode, device::Stream* consumer) {
  const bool captured = consumer != nullptr && consumer->capturing();
  Lock lock = table_.lock();
  drop_dead_pages(lock);
  if (captured) return touch_captured(accesses, lock);
  bool writes = homes_.pending_updates(lock) != nullptr &&
                std::any_of(accesses.begin(), accesses.end(),
                            [](const Access& access) { return access.write; });
  for (bool there = false; !there;) {
    bindings_.require_not_refused(lock);
    if (wait_for_conflict(accesses, lock)) continue;
    if (std::exchange(writes, false)) {
      PendingUpdates* updates = homes_.pending_updates(lock);
      lock.unlock();
      for (const Access& access : accesses) {
        if (access.write) updates->about_to_write(*access.page);
      }
      lock.lock();
      continue;
    }
    for (const Access& access : accesses) table_.pin(record_of(*access.page), lock);
    try {
      there = bring(accesses, lock);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      unpin_all(accesses, lock);
      throw;
    }
  }
  std::size_t used = 0;
  try {
    for (const Access& access : accesses) {
      thread_pins::add(*access.page);
      ++used;
      use(record_of(*access.page), access.write, mode, consumer, lock);
    }
    room_.fetch_ahead(lock);
    lock.unlock();
    if (consumer == nullptr) wait_for_copies(accesses);
    notify_checker(accesses, consumer);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    for (const Access& held : accesses.first(used)) thread_pins::forget(*held.page);
    unpin_all(accesses, lock);
    for (const Access& held : accesses) {
      PageRecord& page = record_of(*held.page);
      if (page.pins == 0 && failed_to_arrive(page)) copies_.drop(page, lock);
    }
    throw;
  }
}

/// An operator waited.
void Touches::note_stall(Nanos& of, Nanos wait, const Lock& /*lock*/) noexcept {
  of += wait;
  stalled_ += wait;
}

/// Into a CUDA graph, which reads the same addresses whenever it is replayed: only what stays there
/// may be read. From now on step() finishes its updates before it returns.
void Touches::touch_captured(std::span<const Access> accesses, Lock& lock) {
  do {
    bindings_.require_not_refused(lock);
    for (const Access& access : accesses) {
      const PageRecord& page = record_of(*access.page);
      if (access.write) {
        throw UserError(
            fmt::format("page '{}' is written by an operator of a CUDA graph", page.name()));
      }
      if (page.holds == 0 && !page.fixed) {
        throw NotHeld(
            fmt::format("page '{}' is read while a CUDA graph is captured, which will be "
                        "replayed with the addresses of now: for as long as it lives, {}",
                        page.name(), options_.pin_advice));
      }
    }
  } while (wait_for_conflict(accesses, lock));
  for (const Access& access : accesses) {
    PageRecord& page = record_of(*access.page);
    page.captured = page.captured || page.fixed;
    table_.pin(page, lock);
    thread_pins::add(*access.page);
    bindings_.bind(page, lock);
  }
}

void Touches::wait_for_copies(std::span<const Access> accesses) {
  if (fetcher_.copies_at_once()) return;
  if (options_.dropped_wait == DroppedWait::Ready) return;
  for (const Access& access : accesses) {
    const PageRecord& page = record_of(*access.page);
    std::shared_ptr<device::Event> copied;
    {
      const Lock lock = table_.lock();  // a held page may be getting another one
      copied = page.ready.event;
    }
    if (copied == nullptr || copied->done()) continue;
    const Stopwatch watch;
    {
      PAGODA_TRACE("pager", "wait for copy", {"page", page.name()});
      copied->wait();
    }
    const Lock lock = table_.lock();
    note_stall(table_.stats(lock).late_stall, watch.elapsed_ns(), lock);
  }
}

/// An operator uses its pages now, or on `consumer`. The pages are pinned.
void Touches::notify_checker(std::span<const Access> accesses, device::Stream* consumer) const {
  device::OrderingChecker* checker = tiers_.device()->checker().get();
  if (checker == nullptr) return;
  for (const Access& access : accesses) {
    const PageRecord& page = record_of(*access.page);
    const std::byte* data = page.device_block().data();
    if (consumer != nullptr) {
      access.write ? checker->write(*consumer, data, page.bytes(), "operator")
                   : checker->read(*consumer, data, page.bytes(), "operator");
    } else {
      access.write ? checker->host_write(data, page.bytes(), "operator")
                   : checker->host_read(data, page.bytes(), "operator");
    }
  }
}

/// Waits until the page is neither on its way in nor out; throws what kept it from coming in.
void Touches::wait_for_page(PageRecord& page, Lock& lock) {
  if (page.residency != Residency::Resident) {
    PAGODA_TRACE("pager", "wait for page", {"page", page.name()}, {"bytes", page.bytes()});
    const bool late = page.prefetched;
    const Stopwatch watch;
    table_.wait(lock, [&] { return !page.moving(); });
    PagerStats& stats = table_.stats(lock);
    note_stall(late ? stats.late_stall : stats.fault_stall, watch.elapsed_ns(), lock);
    if (late) {
      ++stats.late_prefetches;
      page.prefetched = false;
    }
  }
  if (page.failed()) std::rethrow_exception(std::exchange(page.fetch_error, nullptr));
}

/// Another thread's operator may touch a page while this rank's step() is on its way and others
/// have theirs behind them: they do not have this version any more. So it sees the next one.
void Touches::wait_for_own_step(PageRecord& page, Lock& lock) {
  PAGODA_TRACE("pager", "wait for step", {"page", page.name()});
  // step() marks its pages as soon as all ranks are in it. If it does not, ranks have diverged.
  const auto over = [&] { return !page.outdated() || !bindings_.refused(lock).empty(); };
  const Stopwatch watch;
  const bool came = table_.wait_lending_for(lock, options_.own_step, over);
  note_stall(table_.stats(lock).update_stall, watch.elapsed_ns(), lock);
  if (came) return;
  table_.change_version(page, lock, [&] { page.gone = PageRecord::kNoVersion; });
  table_.notify();
  if (page.fetch_error == nullptr) return;
  std::rethrow_exception(std::exchange(page.fetch_error, nullptr));
}

void Touches::use(PageRecord& page, bool write, std::uint8_t mode, device::Stream* consumer,
                  const Lock& lock) {
  ++table_.stats(lock).touches;
  page.last_touch = ++sequence_;
  if (page.prefetched) {
    ++table_.stats(lock).prefetch_hits;
    page.prefetched = false;
  }
  if (Foresight* foresight = table_.foresight(lock)) {
    foresight->stalled(std::exchange(stalled_, 0));
    foresight->touched(page.id, mode, now_ns());
  }
  if (consumer != nullptr) {
    if (page.ready.event != nullptr && page.ready.stream != consumer->id()) {
      consumer->wait(*page.ready.event);
    }
    page.device_block().touch(*consumer);
  }
  bindings_.bind(page, lock);
  if (write) {
    page.contents = Contents::Dirty;
    page.user_wrote = true;
  }
}

void Touches::unpin(std::span<const Access> accesses, device::Stream* consumer) noexcept {
  try {
    // Until now the operator was at it; on a stream, what it was given when it began says it all.
    if (consumer == nullptr) notify_checker(accesses, consumer);
  } catch (...) {  // the checker keeps it
  }
  const Lock lock = table_.lock();
  for (const Access& access : accesses) {
    thread_pins::forget(*access.page);
    if (consumer != nullptr && access.write) {
      record_of(*access.page).written = mark_or_wait(*consumer, lock);
    }
  }
  unpin_all(accesses, lock);
}

/// Behind what the stream has been given so far. Where there can be no mark the work is waited for;
/// where that fails, too, what the stream wrote cannot be trusted, and whoever touches a page next
/// is told.
device::Mark Touches::mark_or_wait(device::Stream& stream, const Lock& lock) noexcept {
  try {
    return stream.mark();
  } catch (...) {  // a wait says why, if it matters
  }
  try {
    stream.synchronize();
  } catch (const std::exception& error) {
    bindings_.refuse(fmt::format("the stream of an operator failed: {}", error.what()), lock);
    table_.notify();
  }
  return {};
}

void Touches::unpin_all(std::span<const Access> accesses, const Lock& lock) noexcept {
  for (const Access& access : accesses) {
    PageRecord& page = record_of(*access.page);
    table_.unpin(page, lock);
    bindings_.unpinned(page, lock);
  }
  room_.notify_unpinned(lock);
}

bool Touches::begin_lookup(const Lookup& lookup, device::Stream* consumer) {
  PageRecord& page = record_of(*lookup.page);
  // Where half of the page or more is read, all of it might as well come.
  if (options_.least_lookup == 0 || page.bytes() < options_.least_lookup || lookup.width == 0 ||
      2 * lookup.count * lookup.width > page.elements) {
    return false;
  }
  if (consumer != nullptr && consumer->capturing()) return false;
  Lock lock = table_.lock();
  drop_dead_pages(lock);
  // Nor is an operator elsewhere about to bring it in, which would bind the storage.
  const bool in_place = page.residency == Residency::Absent && page.pins == page.lookups &&
                        page.home.tier() == Tier::Host && page.whole_home() && !page.own_copy &&
                        !page.blank();
  const Access access{&page, false};
  if (!in_place || page.fetch_error != nullptr || !bindings_.refused(lock).empty() ||
      bindings_.denied_to_others({&access, 1}, lock)) {
    return false;  // touch() knows what to do
  }
  // From here on home stays as and where it is, and the page out of the way of other operators.
  ++page.lookups;
  ++page.readers;
  table_.pin(page, lock);
  PendingUpdates* updates = homes_.pending_updates(lock);
  const bool pending = page.has_pending_update();
  const std::byte* rows = page.home.data();
  const std::uint64_t wanted = page.wanted;
  lock.unlock();
  try {
    if (updates != nullptr && !updates->can_wait_for_rows(page, wanted)) {
      leave_lookup(page);
      return false;
    }
    if (pending) {
      const Stopwatch watch;
      PAGODA_TRACE("pager", "wait for update", {"page", page.name()}, {"rows", lookup.count});
      rows = updates->wait_for_rows(page, elements_of(lookup.rows(), lookup));
      const Lock relock = table_.lock();
      note_stall(table_.stats(relock).update_stall, watch.elapsed_ns(), relock);
    }
  } catch (...) {
    leave_lookup(page);
    throw;
  }
  lock.lock();
  ++table_.stats(lock).lookups;
  table_.stats(lock).host_to_device += lookup.count * lookup.width * page.element_size;
  Bindings::bind_to(page, const_cast<std::byte*>(rows), lock);
  return true;
}

void Touches::end_lookup(PageRecord& page, device::Stream* consumer) noexcept {
  if (consumer != nullptr) {
    const Lock lock = table_.lock();
    device::Mark mark = mark_or_wait(*consumer, lock);
    if (mark.event != nullptr) home_reads::note(page, std::move(mark), lock);
  }
  leave_lookup(page);
}

void Touches::leave_lookup(PageRecord& page) noexcept {
  const Lock lock = table_.lock();
  --page.readers;
  table_.unpin(page, lock);
  if (--page.lookups == 0 && page.exposure != Exposure::None) bindings_.unbind(page, lock);
  table_.notify();
}

void Touches::drop_dead_pages(const Lock& lock) {
  table_.dead_pages().remove_if([&](PageRecord& page) {
    page.dead = true;
    page.binding = nullptr;
    page.exposure = Exposure::None;
    const bool busy = page.moving() || page.readers > 0 || page.pins > 0 ||
                      page.has_pending_update() || page.attached || home_reads::any(page, lock) ||
                      bindings_.is_denied(page, lock);
    if (busy) return false;
    log::debug("pager", "page dropped with its storage", {{"page", page.name()}});
    table_.remove(page, lock);
    return true;
  });
}

}  // namespace pagoda::pager

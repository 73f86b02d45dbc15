// SPDX-License-Identifier: Apache-2.0
// Pager: what happens when an operator touches pages, until it lets go of them.
#include <algorithm>
#include <new>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/pager/pager.h"

namespace pagoda::pager {
namespace {

// Pins that operators of this thread hold, of every pager: waiting for those would never end.
thread_local std::vector<const Page*> pins_of_this_thread;

std::uint32_t pinned_here(const Page& page) {
  return static_cast<std::uint32_t>(
      std::count(pins_of_this_thread.begin(), pins_of_this_thread.end(), &page));
}

/// Forgets one pin, the latest: an operator around this one may have the page pinned, too.
void forget_pin_here(const Page& page) {
  const auto pin = std::find(pins_of_this_thread.rbegin(), pins_of_this_thread.rend(), &page);
  if (pin != pins_of_this_thread.rend()) pins_of_this_thread.erase(std::next(pin).base());
}

/// Whether the copy that brought the page in has failed: what is there is not the page.
bool failed_to_arrive(const Page& page) {
  try {
    if (page.ready.event != nullptr && page.ready.event->done()) page.ready.event->wait();
    return false;
  } catch (...) {
    return true;
  }
}

bool among(const Page& page, std::span<const Access> accesses) {
  return std::any_of(accesses.begin(), accesses.end(),
                     [&](const Access& access) { return access.page == &page; });
}

}  // namespace

void Pager::touch(std::span<const Access> accesses, std::uint8_t mode, device::Stream* consumer) {
  const bool captured = consumer != nullptr && consumer->capturing();
  Lock lock(mutex_);
  bury(lock);
  if (captured) return touch_held(accesses, lock);
  bool writes = debts_ != nullptr && std::any_of(accesses.begin(), accesses.end(),
                                                 [](const Access& access) { return access.write; });
  for (;;) {
    if (!refused_.empty()) throw EngineError(refused_);
    if (denied_to_others(accesses, lock)) {  // until that operator has thrown
      changed_.wait(lock);
      continue;
    }
    const auto owing = std::find_if(accesses.begin(), accesses.end(), [](const Access& access) {
      return access.page->owes() || access.page->lookups > 0;
    });
    if (owing != accesses.end()) {
      if (owing->page->lookups > 0) {  // another thread's operator has the storage, while it runs
        changed_.wait(lock);
        continue;
      }
      PAGODA_CHECK(debts_ != nullptr, "a page owes an update that nobody makes (page {})",
                   owing->page->name);
      PAGODA_TRACE("pager", "wait for update", {"page", owing->page->name});
      Debts* debts = debts_;
      lock.unlock();
      const Stopwatch watch;
      debts->settle(*owing->page);
      lock.lock();
      stats_.update_stall += watch.elapsed_ns();
      stalled_ += watch.elapsed_ns();
      continue;
    }
    if (std::exchange(writes, false)) {
      Debts* debts = debts_;
      lock.unlock();
      for (const Access& access : accesses) {
        if (access.write) debts->about_to_write(*access.page);
      }
      lock.lock();
      continue;
    }
    for (const Access& access : accesses) {
      ++access.page->pins;
      recount(*access.page, lock);
    }
    try {
      if (!start_absent(accesses, lock)) {  // no room until another thread is done with its pages
        unpin_all(accesses, lock);
        ++starved_;
        changed_.wait(lock);
        --starved_;
        continue;
      }
      bool again = false;
      for (const Access& access : accesses) {
        await(*access.page, lock);
        again = again || access.page->residency != Residency::Resident || access.page->owes();
      }
      if (again) {
        unpin_all(accesses, lock);
        continue;
      }
      for (const Access& access : accesses) {
        if (access.write) keep_before(*access.page, lock);
      }
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      unpin_all(accesses, lock);
      throw;
    }
    break;
  }
  std::size_t used = 0;
  try {
    for (const Access& access : accesses) {
      pins_of_this_thread.push_back(access.page);
      ++used;
      use(*access.page, access.write, mode, consumer, lock);
    }
    pump(lock);
    lock.unlock();
    if (consumer == nullptr) await_copies(accesses);
    tell_checker(accesses, consumer);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    unpin_all(accesses, lock);
    for (const Access& held : accesses.first(used)) forget_pin_here(*held.page);
    for (const Access& held : accesses) {
      if (held.page->pins == 0 && failed_to_arrive(*held.page)) drop_copy(*held.page, lock);
    }
    throw;
  }
}

/// Into a CUDA graph, which will read the same addresses whenever it is replayed: only what stays
/// there may be read. It was there when it was held, and an update that it owes comes with the next
/// operator outside of a graph.
void Pager::touch_held(std::span<const Access> accesses, const Lock& lock) {
  for (const Access& access : accesses) {
    if (!refused_.empty()) throw EngineError(refused_);
    const std::string& name = access.page->name;
    if (access.write) {
      throw UserError(fmt::format("page '{}' is written by an operator of a CUDA graph", name));
    }
    if (access.page->holds == 0 && !access.page->fixed) {
      throw NotHeld(
          fmt::format("page '{}' is read while a CUDA graph is captured, which will be "
                      "replayed with the addresses of now: for as long as it lives, {}",
                      name, options_.pin_advice));
    }
  }
  for (const Access& access : accesses) {
    ++access.page->pins;
    recount(*access.page, lock);
    pins_of_this_thread.push_back(access.page);
  }
}

/// The operator runs on this thread: it must wait for copies still under way.
void Pager::await_copies(std::span<const Access> accesses) {
  if (copies_at_once()) return;
  if (options_.dropped_wait == DroppedWait::Ready) return;
  for (const Access& access : accesses) {
    if (access.page->ready.event == nullptr || access.page->ready.event->done()) continue;
    const Stopwatch watch;
    {
      PAGODA_TRACE("pager", "wait for copy", {"page", access.page->name});
      access.page->ready.event->wait();
    }
    const Lock lock(mutex_);
    stats_.late_stall += watch.elapsed_ns();
    stalled_ += watch.elapsed_ns();
  }
}

/// An operator uses its pages now, or on `consumer`. The pages are pinned.
void Pager::tell_checker(std::span<const Access> accesses, device::Stream* consumer) const {
  device::OrderingChecker* checker = tiers_.device()->checker().get();
  if (checker == nullptr) return;
  for (const Access& access : accesses) {
    const Page& page = *access.page;
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

/// Takes room for every absent page and starts its fetch; false when room will only be there once
/// other threads let go.
bool Pager::start_absent(std::span<const Access> accesses, Lock& lock) {
  for (const Access& access : accesses) {
    Page& page = *access.page;
    if (page.residency == Residency::Resident && page.resident_version != page.wanted &&
        !page.fixed) {
      if (page.holds > 0) {  // its pointer is in use: the new bytes come to the same place
        page.ready = room_stream_->mark();
        start_fetch(page, Priority::Urgent, lock);
        continue;
      }
      drop_copy(page, lock);
    }
    if (page.residency != Residency::Absent) continue;
    // What befell a prefetch befalls whoever needs the page: no error is lost.
    if (page.fetch_error != nullptr) {
      std::rethrow_exception(std::exchange(page.fetch_error, nullptr));
    }
    if (!take_block(page, accesses, lock)) return false;
    if (page.residency != Residency::Absent || !page.block) continue;  // all were laid out afresh
    ++stats_.faults;
    start_fetch(page, Priority::Urgent, lock);
  }
  return true;
}

bool Pager::try_take_block(Page& page, const Lock& /*lock*/) {
  auto block = tiers_.arena().try_allocate(page.bytes(), *room_stream_, page.name);
  if (!block) return false;
  page.block = std::move(*block);
  page.ready = room_stream_->mark();
  return true;
}

bool Pager::take_block(Page& page, std::span<const Access> accesses, Lock& lock) {
  for (;;) {
    if (page.residency != Residency::Absent) return true;  // changed while the lock was open
    if (try_take_block(page, lock)) return true;
    if (Page* goes = victim(kNoPage, true, lock)) {
      if (goes->dirty) {
        write_back(*goes, lock);
      } else {
        drop_copy(*goes, lock);
      }
      continue;
    }
    if (others_will_free(accesses, lock)) return false;
    if (take_blocks_afresh(accesses, lock)) return true;
  }
}

/// Whether waiting makes sense: pages on their way in or out, or pinned by operators elsewhere.
bool Pager::others_will_free(std::span<const Access> accesses, const Lock& /*lock*/) const {
  return std::any_of(by_id_.begin(), by_id_.end(), [&](const Page* page) {
    if (page == nullptr) return false;
    const bool ours = among(*page, accesses);
    if (page->residency == Residency::Leaving) return true;
    if (page->residency == Residency::Fetching) return !ours;
    return page->pins > page->holds + pinned_here(*page) + (ours ? 1 : 0);
  });
}

/// The arena holds nothing but this operator's own pages, and yet one does not fit: crumbs. All go
/// out and come in again, largest first, without gaps. False: something else has come meanwhile.
bool Pager::take_blocks_afresh(std::span<const Access> accesses, Lock& lock) {
  ++starved_;  // nothing is fetched ahead into the room that this makes
  try {
    for (bool settled = false; !settled;) {
      settled = true;
      for (const Access& access : accesses) {
        Page& page = *access.page;
        // Those of this operator that are on their way must arrive before they can move.
        if (page.moving()) {
          changed_.wait(lock);
          settled = false;
        } else if (page.residency == Residency::Resident && page.pins == 1 && !page.fixed) {
          if (page.dirty) {
            write_back(page, lock);
            settled = false;
          } else {
            drop_copy(page, lock);
          }
        }
      }
    }
  } catch (...) {
    --starved_;
    throw;
  }
  --starved_;
  std::vector<Page*> absent;
  for (const Access& access : accesses) {
    if (access.page->residency == Residency::Absent) absent.push_back(access.page);
  }
  std::sort(absent.begin(), absent.end(),
            [](const Page* a, const Page* b) { return a->bytes() > b->bytes(); });
  for (Page* page : absent) {
    if (try_take_block(*page, lock)) continue;
    for (Page* taken : absent) taken->block = {};
    const bool came = std::any_of(by_id_.begin(), by_id_.end(), [](const Page* other) {
      return other != nullptr && other->evictable(true);
    });
    if (came || others_will_free(accesses, lock)) return false;
    too_large(accesses);
  }
  for (Page* page : absent) {
    ++stats_.faults;
    start_fetch(*page, Priority::Urgent, lock);
  }
  return true;
}

void Pager::too_large(std::span<const Access> accesses) const {
  std::vector<const Page*> pages;
  for (const Access& access : accesses) {
    if (std::find(pages.begin(), pages.end(), access.page) == pages.end()) {
      pages.push_back(access.page);
    }
  }
  std::stable_sort(pages.begin(), pages.end(),
                   [](const Page* a, const Page* b) { return a->bytes() > b->bytes(); });
  const device::ArenaStats arena = tiers_.arena().stats();
  constexpr std::size_t kListed = 5;
  std::string list;
  Bytes sum = 0;
  Bytes blocks = 0;         // the same in whole blocks
  Bytes held = arena.used;  // by others: what is pinned or placed on the device
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Page& page = *pages[i];
    const Bytes taken = Tiers::device_bytes(page.bytes());
    sum += page.bytes();
    blocks += taken;
    if (page.residency != Residency::Absent) held -= std::min(held, taken);
    if (i >= kListed) continue;
    list +=
        fmt::format("{}{} ({})", list.empty() ? "" : ", ", page.name, format_bytes(page.bytes()));
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
      format_bytes_up(Tiers::least_device_budget(tiers_.options(), needed, 0))));
}

/// Waits until the page is neither on its way in nor out; throws what kept it from coming in.
void Pager::await(Page& page, Lock& lock) {
  if (page.residency != Residency::Resident) {
    PAGODA_TRACE("pager", "wait for page", {"page", page.name}, {"bytes", page.bytes()});
    const bool late = page.prefetched;
    const Stopwatch watch;
    changed_.wait(lock, [&] { return !page.moving(); });
    (late ? stats_.late_stall : stats_.fault_stall) += watch.elapsed_ns();
    stalled_ += watch.elapsed_ns();
    if (late) {
      ++stats_.late_prefetches;
      page.prefetched = false;
    }
  }
  if (page.fetch_error != nullptr) std::rethrow_exception(std::exchange(page.fetch_error, nullptr));
}

void Pager::use(Page& page, bool write, std::uint8_t mode, device::Stream* consumer,
                const Lock& lock) {
  ++stats_.touches;
  page.last_touch = ++sequence_;
  if (page.prefetched) {
    ++stats_.prefetch_hits;
    page.prefetched = false;
  }
  if (foresight_ != nullptr) {
    foresight_->stalled(std::exchange(stalled_, 0));
    foresight_->touched(page.id, mode, now_ns());
  }
  if (consumer != nullptr) {
    if (page.ready.event != nullptr && page.ready.stream != consumer->id()) {
      consumer->wait(*page.ready.event);
    }
    page.device_block().touch(*consumer);
  }
  bind(page, lock);
  if (write) {
    page.dirty = true;
    page.blank = false;
  }
}

void Pager::unpin(std::span<const Access> accesses, device::Stream* consumer) noexcept {
  try {
    // Until now the operator was at it; on a stream, what it was given when it began says it all.
    if (consumer == nullptr) tell_checker(accesses, consumer);
  } catch (...) {  // the checker keeps it
  }
  const Lock lock(mutex_);
  for (const Access& access : accesses) {
    forget_pin(*access.page);
    if (consumer != nullptr && access.write) access.page->written = mark_or_wait(*consumer, lock);
  }
  unpin_all(accesses, lock);
}

void Pager::forget_pin(const Page& page) noexcept {
  forget_pin_here(page);
}

/// Behind what the stream has been given so far. Where there can be no mark the work is waited for;
/// where that fails, too, what the stream wrote cannot be trusted, and whoever touches a page next
/// is told.
device::Mark Pager::mark_or_wait(device::Stream& stream, const Lock& lock) noexcept {
  try {
    return stream.mark();
  } catch (...) {  // a wait says why, if it matters
  }
  try {
    stream.synchronize();
  } catch (const std::exception& error) {
    refuse(fmt::format("the stream of an operator failed: {}", error.what()), lock);
  }
  return {};
}

Bytes Pager::needed(std::span<const Access> accesses) const {
  const Bytes alignment = device::ArenaOptions().alignment;
  const Lock lock(mutex_);
  Bytes sum = 0;
  for (const Access& access : accesses) {
    if (!access.page->fixed) sum += align_up(access.page->bytes(), alignment);
  }
  return sum;
}

void Pager::deny(std::span<const Access> accesses, const std::string& why) noexcept {
  const Lock lock(mutex_);
  for (const Access& access : accesses) {
    Page& page = *access.page;
    if (page.binding == nullptr) continue;
    try {
      denials_.push_back({&page, std::this_thread::get_id(), why});
    } catch (const std::bad_alloc&) {  // other threads do not hear of it
    }
    // A page that other operators run on stays as it is; one that a user holds is bound again.
    if (page.bound && page.pins > page.holds) continue;
    page.binding->unbind(why);
    page.bound = false;
  }
}

void Pager::allow(std::span<const Access> accesses) noexcept {
  const Lock lock(mutex_);
  for (const Access& access : accesses) {
    Page& page = *access.page;
    const auto mine = std::find_if(denials_.begin(), denials_.end(), [&](const Denial& denial) {
      return denial.page == &page && denial.thread == std::this_thread::get_id();
    });
    if (mine != denials_.end()) denials_.erase(mine);
    if (page.bound || page.binding == nullptr) continue;
    if (page.holds > 0 && page.residency == Residency::Resident) {
      page.binding->bind(page.device_block().data());
      page.bound = true;
    } else {
      unbind(page, lock);
    }
  }
  changed_.notify_all();
}

/// Whether an operator of another thread is about to throw because it cannot have one of these. If
/// they came now it could find some of them, and then others in their place. (What runs inside such
/// an operator is of the same thread; and who has a page already does not wait for it.)
bool Pager::denied_to_others(std::span<const Access> accesses, const Lock& /*lock*/) const {
  return std::any_of(denials_.begin(), denials_.end(), [&](const Denial& denial) {
    return denial.thread != std::this_thread::get_id() && among(*denial.page, accesses) &&
           pinned_here(*denial.page) == 0;
  });
}

void Pager::unpin_all(std::span<const Access> accesses, const Lock& lock) noexcept {
  for (const Access& access : accesses) {
    --access.page->pins;
    recount(*access.page, lock);
  }
  if (starved_ > 0) changed_.notify_all();
}

}  // namespace pagoda::pager

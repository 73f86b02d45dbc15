// SPDX-License-Identifier: Apache-2.0
// How pages move: fetches, write-backs, changes of home.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/pager/pager.h"

namespace pagoda::pager {

void Pager::start_fetch(Page& page, Priority priority, const Lock& lock) {
  set_residency(page, Residency::Fetching, lock);
  page.fetch_error = nullptr;
  ++fetching_;
  // The version of now: by the time a thread is free, the page may owe another update, and whoever
  // has to make that waits for this fetch.
  const std::uint64_t version = page.wanted;
  (void)fetchers_.submit([this, &page, version] { fetch(page, version); }, priority);
}

Pager::Lane& Pager::take_lane() {
  const Lock lock(mutex_);
  const auto lane =
      std::find_if(lanes_.begin(), lanes_.end(), [](const Lane& l) { return !l.busy; });
  PAGODA_CHECK(lane != lanes_.end(), "more fetches than threads");
  lane->busy = true;
  return *lane;
}

void Pager::fetch(Page& page, std::uint64_t version) {
  Lane& lane = take_lane();
  device::Mark room;
  {
    const Lock lock(mutex_);
    room = std::move(page.ready);
  }
  const Stopwatch watch;
  std::exception_ptr error;
  device::Mark ready;
  try {
    PAGODA_TRACE("pager", "fetch", {"page", page.name}, {"bytes", page.bytes()});
    if (options_.dropped_wait != DroppedWait::Room) {
      lane.stream->wait(*room.event, device::Stream::OnFailure::Ignore);
    }
    fill(page, page.block.on(*lane.stream), version, lane);
    ready = lane.stream->mark();
  } catch (Error& failure) {
    failure.add_context(context("page", page.name));
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  const bool in_order_at_once = copies_at_once();
  if (error != nullptr && !in_order_at_once) {
    try {
      ready = lane.stream->mark();  // what was queued before the failure still reads home
    } catch (...) {                 // the stream itself has failed
    }
  }
  const Bytes bytes = page.bytes();
  {
    const Lock lock(mutex_);
    --fetching_;
    stats_.fetch_busy += watch.elapsed_ns();
    set_residency(page, Residency::Resident, lock);
    page.resident_version = version;
    if (error != nullptr) {
      page.prefetched = false;
      page.ready = ready;
      drop_copy(page, lock);
      --stats_.evictions;
      page.fetch_error = std::move(error);
    } else {
      page.ready = in_order_at_once ? device::Mark{} : ready;
      if (foresight_ != nullptr && in_order_at_once) foresight_->fetched(bytes, watch.seconds());
    }
    if (in_order_at_once) lane.busy = false;
    changed_.notify_all();
    if (in_order_at_once) pump(lock);
  }
  if (in_order_at_once) return;
  try {
    if (ready.event != nullptr) ready.event->wait();
  } catch (...) {  // who touches the page sees it
  }
  const Lock lock(mutex_);
  if (foresight_ != nullptr) foresight_->fetched(bytes, watch.seconds());
  lane.busy = false;
  pump(lock);
}

void Pager::fill(const Page& page, std::byte* to, std::uint64_t version, Lane& lane) {
  if (page.bytes() == 0) return;
  if (page.blank) {
    lane.stream->fill_async(to, std::byte{0}, page.bytes(), page.name);
    return;
  }
  if (page.own_copy) {
    fill_from(page, page.own_copy, {0, page.elements}, to, lane);
    return;
  }
  fill_from(page, page.home, page.home_range, to, lane);
  if (!page.whole_home()) fill_from_others(page, to, version, lane);
}

namespace {

/// Whether a stream is behind the mark. A stream that has failed counts as if it were: it does
/// nothing more.
bool passed(const device::Mark& mark) noexcept {
  try {
    return mark.event == nullptr || mark.event->done();
  } catch (...) {
    return true;
  }
}

/// Of what has gone, only the order matters.
void wait_quietly(const device::Mark& mark) noexcept {
  try {
    mark.event->wait();
  } catch (...) {
  }
}

}  // namespace

/// A stream has been given something that reads the page's home until `mark`.
void Pager::note_reading(Page& page, device::Mark mark, const Lock& /*lock*/) noexcept {
  std::erase_if(page.reading, passed);
  try {
    page.reading.push_back(mark);
  } catch (...) {  // no memory to remember it with: wait instead
    wait_quietly(mark);
  }
}

/// Whether streams may still have to read it. (A fetch counts as done when its copies are queued.)
bool Pager::home_is_read(const Page& page, const Lock& /*lock*/) noexcept {
  return !passed(page.ready) || !std::all_of(page.reading.begin(), page.reading.end(), passed);
}

/// Returns when they have; throws if the copy of the page that is there has failed. The lock is
/// open meanwhile.
void Pager::await_reads(Page& page, Lock& lock) {
  if (!home_is_read(page, lock)) {
    page.reading.clear();
    return;
  }
  const std::vector<device::Mark> marks = std::exchange(page.reading, {});
  const std::shared_ptr<device::Event> copied = page.ready.event;
  lock.unlock();
  std::exception_ptr error;
  for (const device::Mark& mark : marks) wait_quietly(mark);
  try {
    if (copied != nullptr) copied->wait();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error != nullptr) std::rethrow_exception(error);
}

/// The same for a page that goes: nobody needs its copy any more.
void Pager::let_reads_end(Page& page, Lock& lock) noexcept {
  try {
    await_reads(page, lock);
  } catch (const std::exception& error) {
    log::debug("pager", "a copy failed", {{"page", page.name}, {"cause", error.what()}});
  }
}

namespace {

/// Moves [0, bytes) in pieces that fit into half of a staging buffer; while one half is copied on,
/// the other is filled. `bring` fills host memory, `carry` starts the copy.
template <class Bring>
void through_staging(Bytes bytes, std::byte* to, HostBlock& staging, Bytes staging_bytes,
                     device::Stream& stream, const std::string& label, const Bring& bring) {
  const Bytes half = staging_bytes / 2;
  std::array<device::Mark, 2> carried;
  unsigned turn = 0;
  for (Bytes done = 0; done < bytes; turn ^= 1U) {
    const Bytes piece = std::min(half, bytes - done);
    std::byte* buffer = staging.data() + turn * half;
    if (carried[turn].event != nullptr) carried[turn].event->wait();
    bring(done, std::span(buffer, piece));
    stream.copy_async(to + done, buffer, piece, device::Direction::HostToDevice, label);
    carried[turn] = stream.mark();
    done += piece;
  }
  for (device::Mark& mark : carried) {
    if (mark.event != nullptr) mark.event->wait();
  }
}

}  // namespace

void Pager::fill_from(const Page& page, const Home& home, Range range, std::byte* to, Lane& lane) {
  const Bytes begin = range.begin * page.element_size;
  const Bytes bytes = range.size() * page.element_size;
  if (bytes == 0) return;
  const bool direct = tiers_.device()->kind() == device::DeviceKind::Host;
  switch (home.tier()) {
    case Tier::Host:
      lane.stream->copy_async(to + begin, home.data(), bytes, device::Direction::HostToDevice,
                              page.name);
      break;
    case Tier::Device:
      lane.stream->copy_async(to + begin, home.block().on(*lane.stream), bytes,
                              device::Direction::DeviceToDevice, page.name);
      break;
    case Tier::Nvme:
      if (direct) {
        tiers_.read(home, 0, {to + begin, bytes});
      } else {
        through_staging(
            bytes, to + begin, lane.staging, options_.staging, *lane.stream, page.name,
            [&](Bytes at, std::span<std::byte> buffer) { tiers_.read(home, at, buffer); });
      }
      break;
  }
  const Lock lock(mutex_);
  if (home.tier() == Tier::Nvme) stats_.nvme_to_host += bytes;
  if (home.tier() != Tier::Device) stats_.host_to_device += bytes;
}

void Pager::fill_from_others(const Page& page, std::byte* to, std::uint64_t version, Lane& lane) {
  PAGODA_CHECK(remote_ != nullptr, "a page is sharded and there are no other ranks");
  const bool direct = tiers_.device()->kind() == device::DeviceKind::Host;
  std::vector<RemoteShards::Piece> pieces;
  Bytes bytes = 0;
  for (int rank = 0; rank < options_.sharding.ranks; ++rank) {
    const Range range = options_.sharding.of(page.elements, rank);
    if (rank == options_.rank || range.empty()) continue;
    const Bytes begin = range.begin * page.element_size;
    const Bytes size = range.size() * page.element_size;
    bytes += size;
    if (direct) {
      pieces.push_back({rank, begin, {to + begin, size}});
    } else {
      through_staging(size, to + begin, lane.staging, options_.staging, *lane.stream, page.name,
                      [&](Bytes at, std::span<std::byte> buffer) {
                        const RemoteShards::Piece piece{rank, begin + at, buffer};
                        remote_->pull(page.id, version, {&piece, 1});
                      });
    }
  }
  if (!pieces.empty()) remote_->pull(page.id, version, pieces);
  const Lock lock(mutex_);
  stats_.gathered += bytes;
}

bool Pager::evict(Page& page) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !page.moving(); });
  if (page.residency == Residency::Absent) return true;
  if (page.pins > 0 || page.fixed) return false;
  if (page.dirty) write_back(page, lock);
  if (page.residency == Residency::Resident && page.pins == 0) drop_copy(page, lock);
  return page.residency == Residency::Absent;
}

void Pager::write_back(Page& page) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !page.moving(); });
  if (page.dirty) write_back(page, lock);
}

void Pager::overwrite(Page& page, const std::byte* bytes) {
  const Access access{&page, true};
  touch({&access, 1}, 0, nullptr);
  try {
    if (const auto arrived = page.ready.event) arrived->wait();
    write_stream_->copy_async(page.device_block().on(*write_stream_), bytes, page.bytes(),
                              device::Direction::DeviceToDevice, page.name);
    write_stream_->synchronize();
  } catch (...) {
    unpin({&access, 1}, nullptr);
    throw;
  }
  unpin({&access, 1}, nullptr);
}

/// A fixed page is written in place: masters can only follow if what it held is kept. Pinned.
void Pager::keep_before(Page& page, Lock& lock) {
  const bool has_master = debts_ != nullptr && page.element_size == 2;
  if (!page.fixed || !has_master || page.dirty || page.before) return;
  lock.unlock();
  Home copy = tiers_.allocate(page.bytes(), Placement::Host, tag::kParameters, page.name);
  {
    const std::lock_guard writing(write_mutex_);
    if (page.ready.event != nullptr) page.ready.event->wait();
    if (page.written.event != nullptr) page.written.event->wait();
    for (Bytes done = 0; done < page.bytes();) {
      const std::span buffer(write_staging_.data(),
                             std::min(options_.staging, page.bytes() - done));
      tiers_.read(page.home, done, buffer);
      tiers_.write(copy, done, buffer);
      done += buffer.size();
    }
  }
  lock.lock();
  if (!page.before) page.before = std::move(copy);
}

/// Tells the debts what user code has changed in a fixed page. Holds write_mutex_, not mutex_.
void Pager::tell_fixed(Page& page) {
  const Range kept = debts_->kept(page, shard_of(page));
  const Bytes size = page.element_size;
  const Bytes half = options_.staging / 2 / size * size;
  for (Bytes at = kept.begin * size; at < kept.end * size;) {
    const Bytes piece = std::min(half, kept.end * size - at);
    const std::span after(write_staging_.data(), piece);
    const std::span before(write_staging_.data() + options_.staging / 2, piece);
    tiers_.read(page.home, at, after);
    tiers_.read(page.before, at, before);
    debts_->overwritten(page, at / size, piece / size, before.data(), after.data());
    at += piece;
  }
}

void Pager::write_back(Page& page, Lock& lock) {
  if (page.fixed) {
    page.dirty = false;
    if (!page.before) return;
    lock.unlock();
    {
      const std::lock_guard writing(write_mutex_);
      if (page.ready.event != nullptr) page.ready.event->wait();
      if (page.written.event != nullptr) page.written.event->wait();
      tell_fixed(page);
    }
    lock.lock();
    page.before = {};
    return;
  }
  set_residency(page, Residency::Leaving, lock);
  lock.unlock();
  std::exception_ptr error;
  try {
    PAGODA_TRACE("pager", "write back", {"page", page.name}, {"bytes", page.bytes()});
    const std::lock_guard writing(write_mutex_);
    if (page.ready.event != nullptr) write_stream_->wait(*page.ready.event);
    if (page.written.event != nullptr) write_stream_->wait(*page.written.event);
    for (const device::Mark& mark : page.reading) write_stream_->wait(*mark.event);
    store(page, page.block.on(*write_stream_));
  } catch (Error& failure) {
    failure.add_context(context("page", page.name));
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error == nullptr) page.dirty = false;
  set_residency(page, Residency::Resident, lock);
  ++stats_.writebacks;
  changed_.notify_all();
  if (error != nullptr) std::rethrow_exception(error);
}

/// Copies the whole page from device memory to its home, or to a copy of this rank's own: where
/// home is a shard which others may be reading, and where masters will follow at the step. (They
/// compare with what the last update left; an eviction in between must not count.) Holds
/// write_mutex_, not mutex_.
void Pager::store(Page& page, const std::byte* from) {
  Home* target = &page.home;
  const bool has_master = page.attached && debts_ != nullptr && page.element_size == 2;
  if (page.shared || has_master) {
    if (!page.own_copy) {
      const Placement as_home = page.home.tier() == Tier::Nvme ? Placement::Nvme : Placement::Host;
      Home copy = tiers_.allocate(page.bytes(), as_home, tag::kParameters, page.name);
      const Lock lock(mutex_);
      page.own_copy = std::move(copy);
    }
    target = &page.own_copy;
  }
  const Bytes half = options_.staging / 2 / page.element_size * page.element_size;
  std::byte* after = write_staging_.data();
  for (Bytes done = 0; done < page.bytes();) {
    const Bytes piece = std::min(half, page.bytes() - done);
    write_stream_->copy_async(after, from + done, piece, device::Direction::DeviceToHost,
                              page.name);
    write_stream_->synchronize();
    tiers_.write(*target, done, {after, piece});
    done += piece;
  }
  const Lock lock(mutex_);
  page.blank = false;
  stats_.device_to_host += page.bytes();
  if (target->tier() == Tier::Nvme) stats_.host_to_nvme += page.bytes();
}

/// Elements `written` of a page get the bytes `after`: tells the debts what changes in the shard
/// whose masters this rank keeps. The second half of the staging buffer has what was there before.
void Pager::tell_overwritten(Page& page, Range shard, Range written, const std::byte* after) {
  if (debts_ == nullptr || page.blank) return;
  std::byte* before = write_staging_.data() + options_.staging / 2;
  const Range both = debts_->kept(page, shard);
  const std::uint64_t first = std::max(both.begin, written.begin);
  const std::uint64_t last = std::min(both.end, written.end);
  if (first >= last) return;
  const Bytes size = page.element_size;
  tiers_.read(page.home, (first - page.home_range.begin) * size, {before, (last - first) * size});
  debts_->overwritten(page, first, last - first, before, after + (first - written.begin) * size);
}

/// Does `work` on a page that nobody touches, fetches or reads meanwhile; `lock` is open, and
/// write_mutex_ held, while it runs.
template <class Work>
void Pager::alone_with(Page& page, Lock& lock, const Work& work) {
  const Residency was = page.residency;
  set_residency(page, Residency::Leaving, lock);
  std::exception_ptr error;
  try {
    await_reads(page, lock);
    lock.unlock();
    const std::lock_guard writing(write_mutex_);
    work();
  } catch (...) {
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  set_residency(page, was, lock);
  changed_.notify_all();
  if (error != nullptr) std::rethrow_exception(error);
}

bool Pager::publish(Page& page) {
  write_back(page);
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !page.moving() && page.readers == 0; });
  if (page.holds > 0) keep_held(page, lock);
  if (!page.own_copy) return false;
  alone_with(page, lock, [&] {
    const Bytes size = page.element_size;
    const Bytes half = options_.staging / 2 / size * size;
    const Bytes begin = page.home_range.begin * size;
    for (Bytes done = 0; done < page.home.size();) {
      const Bytes piece = std::min(half, page.home.size() - done);
      const std::span buffer(write_staging_.data(), piece);
      tiers_.read(page.own_copy, begin + done, buffer);
      const std::uint64_t first = (begin + done) / size;
      tell_overwritten(page, page.home_range, {first, first + piece / size}, buffer.data());
      tiers_.write(page.home, done, buffer);
      done += piece;
    }
  });
  page.own_copy = {};
  return true;
}

void Pager::set_home_range(Page& page, Range range, Placement placement) {
  write_back(page);
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !page.moving() && page.readers == 0; });
  page.shared = true;
  if (page.home_range == range || page.fixed) return;
  PAGODA_CHECK(page.whole_home(), "only a whole home can be cut (page {})", page.name);
  const Bytes begin = range.begin * page.element_size;
  const Bytes bytes = range.size() * page.element_size;
  Home cut;
  alone_with(page, lock, [&] {
    cut = tiers_.allocate(bytes, placement, tag::kParameters, page.name);
    for (Bytes done = 0; done < bytes;) {
      const Bytes piece = std::min(options_.staging, bytes - done);
      const std::span buffer(write_staging_.data(), piece);
      tiers_.read(page.home, begin + done, buffer);
      tiers_.write(cut, done, buffer);
      done += piece;
    }
  });
  page.home = std::move(cut);
  page.home_range = range;
}

void Pager::fix(Page& page) {
  const Access access{&page, false};
  touch({&access, 1}, 0, nullptr);
  Lock lock(mutex_);
  PAGODA_CHECK(page.whole_home(), "a sharded page cannot stay whole on the device");
  if (!page.fixed) {
    changed_.wait(lock, [&] { return page.readers == 0; });
    await_reads(page, lock);
    page.home = tiers_.as_home(std::move(page.block));
    page.fixed = true;
    page.dirty = false;
  }
  lock.unlock();
  unpin({&access, 1}, nullptr);
}

}  // namespace pagoda::pager

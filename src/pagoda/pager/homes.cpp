// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/homes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"
#include "pagoda/io/checksum.h"
#include "pagoda/pager/home_reads.h"

namespace pagoda::pager {

Homes::Homes(PageTable& table, Tiers& tiers, const PagerOptions& options, DeviceCopies& copies)
    : table_(table),
      tiers_(tiers),
      options_(options),
      copies_(copies),
      stream_(tiers.device()->make_stream({.name = "pages out"})),
      staging_(tiers.host().allocate(options.staging, tag::kStaging, "write-back staging")) {}

void Homes::create(PageRecord& page, Placement placement, const std::byte* bytes,
                   device::Direction from) {
  page.home =
      tiers_.allocate(page.bytes(), placement == Placement::Device ? Placement::Auto : placement,
                      tag::kParameters, page.name());
  page.home_range = {0, page.elements};
  if (bytes == nullptr || page.bytes() == 0) return;
  if (from == device::Direction::DeviceToHost) {
    const std::lock_guard writing(mutex_);
    store(page, bytes);
  } else {
    tiers_.write(page.home, 0, {bytes, page.bytes()});
  }
  const Lock lock = table_.lock();
  page.fill();
}

void Homes::mark_users(const PageRecord& page) {
  std::vector<device::Mark> taken;
  page.device_block().mark_users(taken);
}

device::Stream& Homes::stream_behind_users(const PageRecord& page) {
  mark_users(page);
  page.device_block().wait_for_users(*stream_);
  return *stream_;
}

void Homes::wait_for_writes(const PageRecord& page, device::Stream* stream) {
  std::array<std::shared_ptr<device::Event>, 2> events;
  {
    const Lock lock = table_.lock();  // a held page may be getting others
    events = {page.ready.event, page.written.event};
  }
  for (const auto& event : events) {
    if (event == nullptr) continue;
    stream != nullptr ? stream->wait(*event) : event->wait();
  }
  if (!page.device_block()) return;
  stream != nullptr ? page.device_block().wait_for_users(*stream)
                    : page.device_block().wait_for_users();
}

void Homes::copy_in(PageRecord& page, const std::byte* bytes) {
  const std::lock_guard writing(mutex_);
  stream_->copy_async(page.device_block().on(*stream_), bytes, page.bytes(),
                      device::Direction::DeviceToDevice, page.name());
  stream_->synchronize();
}

std::uint64_t Homes::checksum(const PageRecord& page, bool of_own_copy) {
  // In blocks, so that it does not depend on how much is staged at a time.
  constexpr Bytes kBlock = 4_KiB;
  std::uint64_t sum = 0;
  const std::lock_guard writing(mutex_);
  wait_for_writes(page, stream_.get());
  const Bytes most = std::max(kBlock, align_down(options_.staging, kBlock));
  for (Bytes done = 0; done < page.bytes();) {
    const Bytes piece = std::min({most, options_.staging, page.bytes() - done});
    if (of_own_copy) {
      tiers_.read(page.own_copy, done, {staging_.data(), piece});
    } else {
      stream_->copy_async(staging_.data(), page.device_block().on(*stream_) + done, piece,
                          device::Direction::DeviceToHost, page.name());
      stream_->synchronize();
    }
    for (Bytes at = 0; at < piece; at += kBlock) {
      sum = sum * 0x9E3779B97F4A7C15U +
            io::checksum({staging_.data() + at, std::min(kBlock, piece - at)});
    }
    done += piece;
  }
  return sum;
}

bool Homes::evict(PageRecord& page) {
  Lock lock = table_.lock();
  table_.wait(lock, [&] { return !page.moving(); });
  if (page.residency == Residency::Absent) return true;
  if (page.pins > 0 || page.fixed) return false;
  if (page.dirty()) write_back(page, lock);
  if (page.residency == Residency::Resident && page.pins == 0) copies_.drop(page, lock);
  return page.residency == Residency::Absent;
}

void Homes::write_back(PageRecord& page) {
  Lock lock = table_.lock();
  table_.wait(lock, [&] { return !page.moving(); });
  if (page.dirty()) write_back(page, lock);
}

/// A fixed page is written in place: masters can only follow if what it held is kept. Pinned.
void Homes::keep_before(PageRecord& page, Lock& lock) {
  const bool has_master = pending_updates_ != nullptr && page.element_size == 2;
  if (!page.fixed || !has_master || page.dirty() || page.before) return;
  const std::uint64_t wanted = page.wanted;
  lock.unlock();
  Home copy = tiers_.allocate(page.bytes(), Placement::Host, tag::kParameters, page.name());
  {
    const std::lock_guard writing(mutex_);
    wait_for_writes(page, nullptr);
    for (Bytes done = 0; done < page.bytes();) {
      const std::span buffer(staging_.data(), std::min(options_.staging, page.bytes() - done));
      tiers_.read(page.home, done, buffer);
      tiers_.write(copy, done, buffer);
      done += buffer.size();
    }
  }
  lock.lock();
  if (!page.before && page.wanted == wanted) page.before = std::move(copy);
}

/// Tells whoever makes the updates what user code has changed in a fixed page. Under mutex_,
/// without the lock.
void Homes::update_masters_of_fixed(PageRecord& page, const Home& kept_before) {
  const Range kept =
      pending_updates_->kept(page, options_.sharding.of(page.elements, options_.rank));
  const Bytes size = page.element_size;
  const Bytes half = options_.staging / 2 / size * size;
  for (Bytes at = kept.begin * size; at < kept.end * size;) {
    const Bytes piece = std::min(half, kept.end * size - at);
    const std::span after(staging_.data(), piece);
    const std::span before(staging_.data() + options_.staging / 2, piece);
    tiers_.read(page.home, at, after);
    tiers_.read(kept_before, at, before);
    pending_updates_->overwritten(page, at / size, piece / size, before.data(), after.data());
    at += piece;
  }
}

void Homes::write_back(PageRecord& page, Lock& lock) {
  if (page.fixed) {
    page.clean();
    // Its own: a write that begins while the lock is open keeps another one.
    const Home before = std::exchange(page.before, {});
    lock.unlock();
    {
      const std::lock_guard writing(mutex_);
      wait_for_writes(page, nullptr);  // whoever reads home from now on finds them
      if (before) update_masters_of_fixed(page, before);
    }
    lock.lock();
    return;
  }
  table_.set_residency(page, Residency::Leaving, lock);
  lock.unlock();
  std::exception_ptr error;
  try {
    PAGODA_TRACE("pager", "write back", {"page", page.name()}, {"bytes", page.bytes()});
    const std::lock_guard writing(mutex_);
    wait_for_writes(page, stream_.get());
    for (const device::Mark& mark : page.reading) stream_->wait(*mark.event);
    store(page, page.block.on(*stream_));
  } catch (Error& failure) {
    failure.add_context(context("page", page.name()));
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error == nullptr) page.clean();
  table_.set_residency(page, Residency::Resident, lock);
  ++table_.stats(lock).writebacks;
  table_.notify();
  if (error != nullptr) std::rethrow_exception(error);
}

/// Copies the whole page from device memory to its home, or to a copy of this rank's own: where
/// home is a shard which others may be reading, and where masters will follow at the step. (They
/// compare with what the last update left; an eviction in between must not count.) Under
/// mutex_, without the lock.
void Homes::store(PageRecord& page, const std::byte* from) {
  Home* target = &page.home;
  const bool has_master = page.attached && pending_updates_ != nullptr && page.element_size == 2;
  if (page.shared || has_master) {
    if (!page.own_copy) {
      const Placement as_home = page.home.tier() == Tier::Nvme ? Placement::Nvme : Placement::Host;
      Home copy = tiers_.allocate(page.bytes(), as_home, tag::kParameters, page.name());
      const Lock lock = table_.lock();
      page.own_copy = std::move(copy);
    }
    target = &page.own_copy;
  }
  const Bytes half = options_.staging / 2 / page.element_size * page.element_size;
  std::byte* after = staging_.data();
  for (Bytes done = 0; done < page.bytes();) {
    const Bytes piece = std::min(half, page.bytes() - done);
    stream_->copy_async(after, from + done, piece, device::Direction::DeviceToHost, page.name());
    stream_->synchronize();
    tiers_.write(*target, done, {after, piece});
    done += piece;
  }
  const Lock lock = table_.lock();
  page.fill();
  table_.stats(lock).device_to_host += page.bytes();
  if (target->tier() == Tier::Nvme) table_.stats(lock).host_to_nvme += page.bytes();
}

/// Elements `written` of a page get the bytes `after`: tells whoever makes the updates what changes
/// in the shard whose masters this rank keeps. The second half of the staging buffer has what was
/// there before.
void Homes::update_masters(PageRecord& page, Range shard, Range written, const std::byte* after) {
  if (pending_updates_ == nullptr || page.blank()) return;
  std::byte* before = staging_.data() + options_.staging / 2;
  const Range both = pending_updates_->kept(page, shard);
  const std::uint64_t first = std::max(both.begin, written.begin);
  const std::uint64_t last = std::min(both.end, written.end);
  if (first >= last) return;
  const Bytes size = page.element_size;
  tiers_.read(page.home, (first - page.home_range.begin) * size, {before, (last - first) * size});
  pending_updates_->overwritten(page, first, last - first, before,
                                after + (first - written.begin) * size);
}

/// Does `work` on a page that nobody touches, fetches or reads meanwhile; `lock` is open, and
/// mutex_ held, while it runs.
template <class Work>
void Homes::run_exclusive(PageRecord& page, Lock& lock, const Work& work) {
  const Residency was = page.residency;
  table_.set_residency(page, Residency::Leaving, lock);
  std::exception_ptr error;
  try {
    home_reads::wait(page, lock);
    lock.unlock();
    const std::lock_guard writing(mutex_);
    work();
  } catch (...) {
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  table_.set_residency(page, was, lock);
  table_.notify();
  if (error != nullptr) std::rethrow_exception(error);
}

bool Homes::publish(PageRecord& page, Lock& lock) {
  if (!page.own_copy) return false;
  run_exclusive(page, lock, [&] {
    const Bytes size = page.element_size;
    const Bytes half = options_.staging / 2 / size * size;
    const Bytes begin = page.home_range.begin * size;
    for (Bytes done = 0; done < page.home.size();) {
      const Bytes piece = std::min(half, page.home.size() - done);
      const std::span buffer(staging_.data(), piece);
      tiers_.read(page.own_copy, begin + done, buffer);
      const std::uint64_t first = (begin + done) / size;
      update_masters(page, page.home_range, {first, first + piece / size}, buffer.data());
      tiers_.write(page.home, done, buffer);
      done += piece;
    }
  });
  page.own_copy = {};
  return true;
}

void Homes::cut(PageRecord& page, Range range, Placement placement) {
  write_back(page);
  Lock lock = table_.lock();
  table_.wait(lock, [&] { return !page.moving() && page.readers == 0; });
  page.shared = true;
  if (page.home_range == range || page.fixed) return;
  PAGODA_CHECK(page.whole_home(), "only a whole home can be cut (page {})", page.name());
  const Bytes begin = range.begin * page.element_size;
  const Bytes bytes = range.size() * page.element_size;
  Home shard;
  run_exclusive(page, lock, [&] {
    shard = tiers_.allocate(bytes, placement, tag::kParameters, page.name());
    for (Bytes done = 0; done < bytes;) {
      const Bytes piece = std::min(options_.staging, bytes - done);
      const std::span buffer(staging_.data(), piece);
      tiers_.read(page.home, begin + done, buffer);
      tiers_.write(shard, done, buffer);
      done += piece;
    }
  });
  page.home = std::move(shard);
  page.home_range = range;
}

void Homes::read(const PageRecord& page, Range elements, Bytes piece, const ReadPiece& read) {
  const std::lock_guard writing(mutex_);
  PAGODA_CHECK(elements.begin >= page.home_range.begin && elements.end <= page.home_range.end,
               "page '{}' is not all here", page.name());
  const Bytes first = page.home_range.begin * page.element_size;
  const Bytes end = elements.end * page.element_size;
  piece = std::min(piece, options_.staging);
  for (Bytes at = elements.begin * page.element_size; at < end;) {
    const std::span bytes(staging_.data(), std::min(piece, end - at));
    if (page.blank()) {
      std::memset(bytes.data(), 0, bytes.size());
    } else {
      tiers_.read(page.home, at - first, bytes);
    }
    read(bytes);
    at += bytes.size();
  }
}

void Homes::write(PageRecord& page, Bytes piece, const WritePiece& write) {
  Lock lock = table_.lock();
  table_.wait(lock, [&] { return !page.moving() && page.readers == 0; });
  if (page.residency == Residency::Resident && !page.fixed) {
    PAGODA_CHECK_EQ(page.pins, 0U, "a page in use is overwritten (page {})", page.name());
    copies_.drop(page, lock);
  }
  const Residency was = page.residency;
  // Nobody fetches it meanwhile.
  if (!page.fixed) table_.set_residency(page, Residency::Leaving, lock);
  std::exception_ptr error;
  try {
    home_reads::wait(page, lock);
    lock.unlock();
    const std::lock_guard writing(mutex_);
    if (page.written.event != nullptr) page.written.event->wait();
    if (page.fixed) mark_users(page);
    piece = std::min(piece, options_.staging);
    for (Bytes at = 0; at < page.home.size();) {
      const std::span bytes(staging_.data(), std::min(piece, page.home.size() - at));
      write(bytes);
      tiers_.write(page.home, at, bytes);
      at += bytes.size();
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  page.fill();
  page.clean();
  page.own_copy = {};
  page.before = {};
  if (!page.fixed) table_.set_residency(page, was, lock);
  table_.notify();
  if (error != nullptr) std::rethrow_exception(error);
}

void Homes::fill_blank(PageRecord& page) {
  {
    const Lock lock = table_.lock();
    if (!page.blank() || page.dirty() || page.fixed) return;
  }
  write(page, options_.staging,
        [](std::span<std::byte> bytes) { std::memset(bytes.data(), 0, bytes.size()); });
}

}  // namespace pagoda::pager

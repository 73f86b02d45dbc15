// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/fetcher.h"

#include <algorithm>
#include <array>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"
#include "pagoda/comm/comm_error.h"

namespace pagoda::pager {

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

Fetcher::Fetcher(PageTable& table, Tiers& tiers, const PagerOptions& options, DeviceCopies& copies,
                 std::function<void(const Lock&)> on_idle)
    : table_(table),
      tiers_(tiers),
      options_(options),
      copies_(copies),
      on_idle_(std::move(on_idle)),
      lanes_(options.fetch_threads),
      threads_(options.fetch_threads, "fetch") {
  unsigned number = 0;
  for (Lane& lane : lanes_) {
    lane.stream = tiers_.device()->make_stream({.name = fmt::format("pages in {}", number++)});
    if (tiers_.device()->kind() == device::DeviceKind::Host) continue;  // filled without it
    lane.staging = tiers_.host().allocate(options_.staging, tag::kStaging, "fetch staging");
  }
}

void Fetcher::start(PageRecord& page, Priority priority, const Lock& lock) {
  start(page, {page.wanted, nullptr}, priority, lock);
}

void Fetcher::start_ahead(PageRecord& page, const Lock& lock) {
  start(page, {page.next == nullptr ? page.wanted : page.wanted + 1, page.next}, Priority::Normal,
        lock);
}

/// What to fetch is decided now: by the time a thread is free, the page may have another pending
/// update, and whoever has to make that waits for this fetch.
void Fetcher::start(PageRecord& page, Source source, Priority priority, const Lock& lock) {
  PAGODA_CHECK(!page.has_pending_update(), "page {} is fetched while it is updated", page.name());
  const Residency was = page.residency;
  source.in_place = was == Residency::Resident;
  table_.set_residency(page, Residency::Fetching, lock);
  page.fetch_error = nullptr;
  table_.change_version(page, lock, [&] { page.gone = PageRecord::kNoVersion; });
  ++running_;
  try {
    (void)threads_.submit([this, &page, source] { fetch(page, source); }, priority);
  } catch (...) {  // no memory for the job: nobody may wait for it
    --running_;
    table_.set_residency(page, was, lock);
    throw;
  }
}

Fetcher::Lane& Fetcher::take_lane() {
  const Lock lock = table_.lock();
  const auto lane =
      std::find_if(lanes_.begin(), lanes_.end(), [](const Lane& l) { return !l.busy; });
  PAGODA_CHECK(lane != lanes_.end(), "more fetches than threads");
  lane->busy = true;
  return *lane;
}

void Fetcher::fetch(PageRecord& page, Source source) {
  Lane& lane = take_lane();
  device::Mark room;
  {
    const Lock lock = table_.lock();
    room = std::move(page.ready);
  }
  const Stopwatch watch;
  std::exception_ptr error;
  bool gone = false;
  device::Mark ready;
  try {
    PAGODA_TRACE("pager", "fetch", {"page", page.name()}, {"bytes", page.bytes()});
    if (options_.dropped_wait != DroppedWait::Room) {
      lane.stream->wait(*room.event, device::Stream::OnFailure::Ignore);
    }
    fill(page, page.block.on(*lane.stream), source, lane);
    ready = lane.stream->mark();
  } catch (Error& failure) {
    failure.add_context(context("page", page.name()));
    error = std::current_exception();
    gone = dynamic_cast<const comm::VersionGone*>(&failure) != nullptr;
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
    const Lock lock = table_.lock();
    --running_;
    table_.stats(lock).fetch_busy += watch.elapsed_ns();
    table_.set_residency(page, Residency::Resident, lock);
    page.resident_version = source.version;
    if (error != nullptr) {
      page.prefetched = false;
      page.ready = ready;
      if (source.in_place) {  // whoever has its address keeps it
        page.resident_version = PageRecord::kNoVersion;
      } else {
        copies_.drop(page, lock);
        --table_.stats(lock).evictions;
      }
      page.fetch_error = std::move(error);
      if (gone) table_.change_version(page, lock, [&] { page.gone = source.version; });
    } else {
      page.ready = in_order_at_once ? device::Mark{} : ready;
      if (in_order_at_once) note_rate(bytes, watch.seconds(), lock);
    }
    if (in_order_at_once) lane.busy = false;
    table_.notify();
    if (in_order_at_once) on_idle_(lock);
  }
  if (in_order_at_once) return;
  try {
    if (ready.event != nullptr) ready.event->wait();
  } catch (...) {  // who touches the page sees it
  }
  const Lock lock = table_.lock();
  note_rate(bytes, watch.seconds(), lock);
  lane.busy = false;
  on_idle_(lock);
}

void Fetcher::note_rate(Bytes bytes, double seconds, const Lock& lock) {
  if (Foresight* foresight = table_.foresight(lock)) foresight->fetched(bytes, seconds);
}

void Fetcher::fill(const PageRecord& page, std::byte* to, Source source, Lane& lane) {
  if (page.bytes() == 0) return;
  if (page.blank()) {
    lane.stream->fill_async(to, std::byte{0}, page.bytes(), page.name());
    return;
  }
  if (source.next != nullptr) {
    fill_from(page, *source.next, {0, page.elements}, to, lane);
    return;
  }
  if (page.own_copy) {
    fill_from(page, page.own_copy, {0, page.elements}, to, lane);
    return;
  }
  fill_from(page, page.home, page.home_range, to, lane);
  if (!page.whole_home()) fill_from_others(page, to, source.version, lane);
}

void Fetcher::fill_from(const PageRecord& page, const Home& home, Range range, std::byte* to,
                        Lane& lane) {
  const Bytes begin = range.begin * page.element_size;
  const Bytes bytes = range.size() * page.element_size;
  if (bytes == 0) return;
  const bool direct = tiers_.device()->kind() == device::DeviceKind::Host;
  switch (home.tier()) {
    case Tier::Host:
      lane.stream->copy_async(to + begin, home.data(), bytes, device::Direction::HostToDevice,
                              page.name());
      break;
    case Tier::Device:
      lane.stream->copy_async(to + begin, home.block().on(*lane.stream), bytes,
                              device::Direction::DeviceToDevice, page.name());
      break;
    case Tier::Nvme:
      if (direct) {
        tiers_.read(home, 0, {to + begin, bytes});
      } else {
        through_staging(
            bytes, to + begin, lane.staging, options_.staging, *lane.stream, page.name(),
            [&](Bytes at, std::span<std::byte> buffer) { tiers_.read(home, at, buffer); });
      }
      break;
  }
  const Lock lock = table_.lock();
  if (home.tier() == Tier::Nvme) table_.stats(lock).nvme_to_host += bytes;
  if (home.tier() != Tier::Device) table_.stats(lock).host_to_device += bytes;
}

void Fetcher::fill_from_others(const PageRecord& page, std::byte* to, std::uint64_t version,
                               Lane& lane) {
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
      through_staging(size, to + begin, lane.staging, options_.staging, *lane.stream, page.name(),
                      [&](Bytes at, std::span<std::byte> buffer) {
                        const RemoteShards::Piece piece{rank, begin + at, buffer};
                        remote_->pull(page.id, version, {&piece, 1});
                      });
    }
  }
  if (!pieces.empty()) remote_->pull(page.id, version, pieces);
  const Lock lock = table_.lock();
  table_.stats(lock).gathered += bytes;
}

}  // namespace pagoda::pager

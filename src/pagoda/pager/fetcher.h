// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "pagoda/base/thread_pool.h"
#include "pagoda/device/stream.h"
#include "pagoda/pager/device_copies.h"
#include "pagoda/pager/page_table.h"
#include "pagoda/pager/pager_options.h"
#include "pagoda/pager/remote_shards.h"

namespace pagoda::pager {

/// Brings pages to the device, from wherever their bytes are: threads, streams and buffers.
class Fetcher {
 public:
  using Lock = PageTable::Lock;

  /// `on_idle` is called with the lock when a fetch is over: another one may start.
  Fetcher(PageTable& table, Tiers& tiers, const PagerOptions& options, DeviceCopies& copies,
          std::function<void(const Lock&)> on_idle);
  /// Drops fetches that have not begun, and waits for the others.
  void stop() noexcept { threads_.stop(ThreadPool::Stop::Cancel); }

  /// The other ranks' shards; set before the first fetch that needs them.
  void set_remote(RemoteShards* remote, const Lock& /*lock*/) { remote_ = remote; }

  /// Begins to fill the page's block. What keeps it from coming in is kept with the page.
  void start(PageRecord& page, Priority priority, const Lock& lock);
  /// The same for a page that nobody waits for: its next version, if that is complete.
  void start_ahead(PageRecord& page, const Lock& lock);
  /// Whether a fetch that is begun now would begin soon.
  bool has_capacity(const Lock& /*lock*/) const noexcept { return running_ < 2 * lanes_.size(); }
  /// A copy is over when it has been issued, and nobody needs to be told of waits.
  bool copies_at_once() const noexcept {
    return tiers_.device()->kind() == device::DeviceKind::Host &&
           tiers_.device()->checker() == nullptr;
  }

 private:
  /// What one fetch thread works with.
  struct Lane {
    std::shared_ptr<device::Stream> stream;
    HostBlock staging;
    bool busy = false;
  };

  struct Source {
    std::uint64_t version = 0;
    const Home* next = nullptr;  // where it is, if not at home
    bool in_place = false;       // over a copy whose address is in use
  };

  void start(PageRecord& page, Source source, Priority priority, const Lock& lock);
  void fetch(PageRecord& page, Source source);
  Lane& take_lane();
  void note_rate(Bytes bytes, double seconds, const Lock& lock);
  void fill(const PageRecord& page, std::byte* to, Source source, Lane& lane);
  void fill_from(const PageRecord& page, const Home& home, Range range, std::byte* to, Lane& lane);
  void fill_from_others(const PageRecord& page, std::byte* to, std::uint64_t version, Lane& lane);

  PageTable& table_;
  Tiers& tiers_;
  const PagerOptions& options_;
  DeviceCopies& copies_;
  const std::function<void(const Lock&)> on_idle_;
  RemoteShards* remote_ = nullptr;
  std::vector<Lane> lanes_;    // `busy` guarded by the table's lock
  std::uint32_t running_ = 0;  // guarded by the table's lock
  ThreadPool threads_;         // last: they use all of the above
};

}  // namespace pagoda::pager

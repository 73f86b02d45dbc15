// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <span>

#include "pagoda/base/clock.h"
#include "pagoda/pager/lookup.h"
#include "pagoda/pager/room.h"

namespace pagoda::pager {

/// What happens when an operator uses pages, until it lets go of them: it touches them, or looks up
/// rows where they lie ("Lookups" in docs/notes/paging.md).
class Touches {
 public:
  using Lock = PageTable::Lock;

  Touches(PageTable& table, Tiers& tiers, const PagerOptions& options, Bindings& bindings,
          DeviceCopies& copies, Homes& homes, Fetcher& fetcher, Room& room)
      : table_(table),
        tiers_(tiers),
        options_(options),
        bindings_(bindings),
        copies_(copies),
        homes_(homes),
        fetcher_(fetcher),
        room_(room) {}

  void touch(std::span<const Access> accesses, std::uint8_t mode, device::Stream* consumer);
  void unpin(std::span<const Access> accesses, device::Stream* consumer) noexcept;
  /// The operator may use the bytes on this thread, or on any stream, once the copies that are
  /// still under way are over.
  void wait_for_copies(std::span<const Access> accesses);

  /// False: the page must be touched.
  bool begin_lookup(const Lookup& lookup, device::Stream* consumer);
  void end_lookup(PageRecord& page, device::Stream* consumer) noexcept;

  /// Forgets pages whose storage has died and that nobody needs.
  void drop_dead_pages(const Lock& lock);

 private:
  void touch_captured(std::span<const Access> accesses, Lock& lock);
  bool wait_for_conflict(std::span<const Access> accesses, Lock& lock);
  bool bring(std::span<const Access> accesses, Lock& lock);
  static bool complete(std::span<const Access> accesses, const Lock& lock);
  void note_stall(Nanos& of, Nanos wait, const Lock& lock) noexcept;
  void wait_for_page(PageRecord& page, Lock& lock);
  void wait_for_own_step(PageRecord& page, Lock& lock);
  void use(PageRecord& page, bool write, std::uint8_t mode, device::Stream* consumer,
           const Lock& lock);
  void unpin_all(std::span<const Access> accesses, const Lock& lock) noexcept;
  void notify_checker(std::span<const Access> accesses, device::Stream* consumer) const;
  device::Mark mark_or_wait(device::Stream& stream, const Lock& lock) noexcept;
  void leave_lookup(PageRecord& page) noexcept;

  PageTable& table_;
  Tiers& tiers_;
  const PagerOptions& options_;
  Bindings& bindings_;
  DeviceCopies& copies_;
  Homes& homes_;
  Fetcher& fetcher_;
  Room& room_;
  std::uint64_t sequence_ = 0;  // guarded by the table's lock
  Nanos stalled_ = 0;           // guarded by the table's lock: since the last touch
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <span>

#include "pagoda/pager/access.h"
#include "pagoda/pager/fetcher.h"
#include "pagoda/pager/homes.h"

namespace pagoda::pager {

/// Who gets room on the device, and who has to go for it.
class Room {
 public:
  using Lock = PageTable::Lock;

  Room(PageTable& table, Tiers& tiers, Bindings& bindings, DeviceCopies& copies, Homes& homes,
       Fetcher& fetcher)
      : table_(table),
        tiers_(tiers),
        bindings_(bindings),
        copies_(copies),
        homes_(homes),
        fetcher_(fetcher) {}

  /// Takes room for every absent page of an operator, which has them pinned, and starts its fetch;
  /// false when room will only be there once other threads let go. The lock may be open meanwhile:
  /// a page that gets a pending update then is left alone.
  bool bring(std::span<const Access> accesses, Lock& lock);
  /// Until bring() may have more luck.
  void wait_for_room(Lock& lock);
  /// Those who wait may try again.
  void notify_unpinned(const Lock& lock) noexcept;
  /// Starts what the foresight wants fetched ahead, as far as room can be made.
  void fetch_ahead(const Lock& lock);

 private:
  PageRecord* victim(PageId for_page, bool may_be_dirty, const Lock& lock);
  bool take(PageRecord& page, std::span<const Access> accesses, Lock& lock);
  bool others_will_free(std::span<const Access> accesses, const Lock& lock) const;
  bool take_afresh(std::span<const Access> accesses, Lock& lock);
  [[noreturn]] void too_large(std::span<const Access> accesses, const Lock& lock) const;

  PageTable& table_;
  Tiers& tiers_;
  Bindings& bindings_;
  DeviceCopies& copies_;
  Homes& homes_;
  Fetcher& fetcher_;
  std::uint32_t starved_ = 0;  // guarded by the table's lock: touches waiting for room
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <span>
#include <vector>

#include "pagoda/pager/room.h"

namespace pagoda::pager {

/// Which version of its values a page's home has, which one anybody may see, and who reads it.
class Versions {
 public:
  using Lock = PageTable::Lock;

  Versions(PageTable& table, Bindings& bindings, DeviceCopies& copies, Room& room)
      : table_(table), bindings_(bindings), copies_(copies), room_(room) {}

  /// Pager's functions of the same names say what they do.
  std::vector<Page*> mark_pending(std::span<Page* const> pages);
  void updated(PageRecord& page, std::uint64_t version);
  void wait_for_version(const PageRecord& page);
  bool supersede(PageRecord& page);
  void end_supersede(PageRecord& page);
  void offer_next(PageRecord& page, const Home& next);
  void withdraw_next(PageRecord& page);
  void exchange_home(PageRecord& page, Home& other);
  std::uint64_t add_reader(PageRecord& page);
  void remove_reader(PageRecord& page) noexcept;

 private:
  PageTable& table_;
  Bindings& bindings_;
  DeviceCopies& copies_;
  Room& room_;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <memory>

#include "pagoda/device/stream.h"
#include "pagoda/pager/bindings.h"
#include "pagoda/pager/page_table.h"

namespace pagoda::pager {

/// The blocks of the arena that pages have while they are on the device. Under the table's lock.
class DeviceCopies {
 public:
  using Lock = PageTable::Lock;

  DeviceCopies(PageTable& table, Tiers& tiers, Bindings& bindings);

  /// False: there is no room for the page.
  bool try_take(PageRecord& page, const Lock& lock);
  /// The copy of now is to be overwritten, in the block that it has, when its users are done.
  void reuse(PageRecord& page, const Lock& lock);
  /// Forgets the resident copy; home has the bytes, or nobody wants these any more.
  void drop(PageRecord& page, const Lock& lock);

 private:
  PageTable& table_;
  Tiers& tiers_;
  Bindings& bindings_;
  // Blocks are taken for this stream, which has no work: its mark is what a fetch waits for before
  // it overwrites what others may still be reading.
  std::shared_ptr<device::Stream> stream_;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pagoda/pager/page.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::pager {

/// Updates that are marked as pending. `optim/` has the real one. Any thread may call it, without
/// the pager's lock.
class PendingUpdates {
 public:
  virtual ~PendingUpdates() = default;
  /// Returns when every pending update of `page` is in its home; brings it to the front of the
  /// queue.
  virtual void wait_for_update(Page& page) = 0;
  /// Whether wait_for_rows() returns long before wait_for_update() would. `wanted`: updates that
  /// the page must have seen; no, if the last of them is marked as pending and has not begun.
  virtual bool can_wait_for_rows(const Page& /*page*/, std::uint64_t /*wanted*/) { return false; }
  /// The same as wait_for_update() for these elements, in ascending order, alone. Returns where
  /// element 0 of the page, and with it they, are: its home, or what is about to become its home.
  virtual const std::byte* wait_for_rows(Page& page, std::span<const Range> rows) = 0;
  /// User code is about to write to a page without a pending update: returns when no other rank
  /// still has to read what it holds now.
  virtual void about_to_write(Page& /*page*/) {}
  /// The same of a page that user code has a pointer to from now on: it may write there unseen. And
  /// no update that has begun still has to read it.
  virtual void about_to_hold(Page& /*page*/) {}
  /// The elements of `page` whose master this rank keeps; `shard` where it does not know better.
  virtual Range kept(const Page& page, Range shard) = 0;
  /// User code has written elements [begin, begin + count) of a page without a pending update: what
  /// home had, and what it gets. Masters follow.
  virtual void overwritten(Page& page, std::uint64_t begin, std::uint64_t count,
                           const std::byte* before, const std::byte* after) = 0;
};

}  // namespace pagoda::pager

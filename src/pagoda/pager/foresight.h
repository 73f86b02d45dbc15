// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "pagoda/base/bytes.h"
#include "pagoda/base/clock.h"
#include "pagoda/pager/page.h"

namespace pagoda::pager {

/// A page, as those see it who plan ahead.
struct Outlook {
  enum class Where : std::uint8_t {
    Nowhere,   ///< gone, or with nothing to be fetched: neither to come nor to go
    Absent,    ///< can be fetched
    Awaited,   ///< cannot be fetched yet: its next version is being made
    Moving,    ///< on its way in or out
    Resident,  ///< there
  };
  Bytes bytes = 0;
  Where where = Where::Nowhere;
  bool in_use = false;  // pinned, or never to leave
  bool dirty = false;   // has to be written back before it leaves
};

/// What the pager tells of itself when it asks what to fetch or evict.
class Occupancy {
 public:
  virtual ~Occupancy() = default;
  virtual Outlook page(PageId id) const = 0;
  /// In any order.
  virtual std::span<const PageId> resident() const = 0;
  /// Bytes of the arena that are free in one piece.
  virtual Bytes free() const = 0;
  /// Bytes of resident pages that are neither in use nor dirty.
  virtual Bytes evictable() const = 0;
  /// Pages that owe an update.
  virtual std::size_t owing() const = 0;
  /// Grows when a page comes, goes or can be fetched again.
  virtual std::uint64_t changes() const = 0;
};

/// Knows what will be touched next, from what was touched before. The pager asks under its lock; a
/// foresight neither blocks nor calls back. `prefetch/` has the real one; without any, nothing is
/// fetched ahead and the least recently used page goes.
class Foresight {
 public:
  virtual ~Foresight() = default;
  /// A page was touched. `mode` tells apart what else looks alike (training, evaluation, backward).
  virtual void touched(PageId page, std::uint8_t mode, Nanos now) = 0;
  /// The toucher waited for so long: that is not time that its operators take.
  virtual void stalled(Nanos wait) = 0;
  virtual void forget(PageId page) = 0;
  /// A page has left the device, or can be fetched again since its update is made.
  virtual void absent(PageId /*page*/) {}
  /// A fetch of `bytes` took `seconds`.
  virtual void fetched(Bytes bytes, double seconds) = 0;
  /// The absent page to start fetching now, or kNoPage.
  virtual PageId next_fetch(const Occupancy& occupancy) = 0;
  /// Which of the evictable pages goes to make room for `for_page`, which is to be fetched ahead
  /// (kNoPage: an operator waits). kNoPage: none, for all that could go are needed sooner.
  virtual PageId victim(const Occupancy& occupancy, PageId for_page, bool may_be_dirty) = 0;
  /// Touches until the page's next expected use; the largest number where none is expected.
  virtual std::size_t next_use(PageId /*page*/) const {
    return std::numeric_limits<std::size_t>::max();
  }
};

/// Updates that pages owe. `optim/` has the real one. Any thread may call it, without the pager's
/// lock.
class Debts {
 public:
  virtual ~Debts() = default;
  /// Returns when `page`'s home has seen all updates that it owes; brings it to the front of the
  /// queue.
  virtual void settle(Page& page) = 0;
  /// Whether some of `page` can be settled long before the rest. `wanted`: updates that it must
  /// have seen; no, if somebody is about to owe the last of them and has not begun it.
  virtual bool settles_parts(const Page& /*page*/, std::uint64_t /*wanted*/) { return false; }
  /// The same as settle() for these elements, in ascending order, alone. Returns where element 0 of
  /// the page, and with it they, are: its home, or what is about to become its home.
  virtual const std::byte* settle_parts(Page& page, std::span<const Range> parts) = 0;
  /// User code is about to write to a page that owes nothing: returns when no other rank still has
  /// to read what it holds now.
  virtual void about_to_write(Page& /*page*/) {}
  /// The same of a page that user code has a pointer to from now on: it may write there unseen.
  virtual void about_to_hold(Page& /*page*/) {}
  /// The elements of `page` whose master this rank keeps; `shard` where it does not know better.
  virtual Range kept(const Page& page, Range shard) = 0;
  /// User code has written elements [begin, begin + count) of a page that owes nothing: what home
  /// had, and what it gets. Masters follow.
  virtual void overwritten(Page& page, std::uint64_t begin, std::uint64_t count,
                           const std::byte* before, const std::byte* after) = 0;
};

/// The other ranks' shards, read one-sidedly. Any fetch thread may call it.
class RemoteShards {
 public:
  struct Piece {
    int rank = 0;
    Bytes begin = 0;  // in the page
    std::span<std::byte> to;
  };
  virtual ~RemoteShards() = default;
  /// Fills every piece with `page`'s bytes as of `version`. Throws what the other rank did.
  virtual void pull(PageId page, std::uint64_t version, std::span<const Piece> pieces) = 0;
};

}  // namespace pagoda::pager

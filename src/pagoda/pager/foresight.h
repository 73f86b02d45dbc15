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
    Pending,   ///< cannot be fetched yet: its next version is being made
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
  /// Pages that cannot be fetched yet, resident ones included: their next version is being made.
  virtual std::size_t awaiting_update() const = 0;
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

}  // namespace pagoda::pager

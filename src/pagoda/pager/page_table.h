// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/pager/dead_pages.h"
#include "pagoda/pager/foresight.h"
#include "pagoda/pager/page_record.h"
#include "pagoda/pager/pager_stats.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::pager {

/// All pages of one rank, where each of them is, and the one lock that guards what changes of them.
///
/// Every change of residency, of pins and of pending updates goes through here, so that what is
/// counted stays right. Those who take a Lock must have it; nothing waits for bytes while holding
/// it.
class PageTable final : public Occupancy {
 public:
  using Lock = RankedLock<LockRank::PageTable>;

  explicit PageTable(Tiers& tiers) : tiers_(tiers) {}

  Lock lock() const { return Lock(mutex_); }
  /// Until a page has changed state, was unpinned or unread.
  void wait(Lock& lock) { changed_.wait(lock); }
  template <class Done>
  void wait(Lock& lock, const Done& done) {
    changed_.wait(lock, done);
  }
  void notify() noexcept { changed_.notify_all(); }

  // For those who wait until operators of other threads let go of pages, or have thrown. They may
  // be inside an operator that has pages itself, and so may the others: these pages are lent
  // meanwhile, which says that nobody runs on them, and that waiting for them would never end.
  void wait_lending(Lock& lock);
  template <class Done>
  void wait_lending(Lock& lock, const Done& done) {
    lend(lock);
    notify();
    changed_.wait(lock, done);
    take_back(lock);
  }
  /// The same, for so long; false: it is not done.
  template <class Duration, class Done>
  bool wait_lending_for(Lock& lock, const Duration& limit, const Done& done) {
    lend(lock);
    notify();
    const bool is_done = changed_.wait_for(lock, limit, done);
    take_back(lock);
    return is_done;
  }
  /// The same, asking `done` whenever a page was unpinned or lent as well.
  template <class Done>
  void wait_for_pins(Lock& lock, const Done& done) {
    lend(lock);
    notify();
    ++pin_waiters_;
    unpinned_.wait(lock, done);
    --pin_waiters_;
    take_back(lock);
  }
  void notify_pin_waiters(const Lock& /*lock*/) noexcept {
    if (pin_waiters_ > 0) unpinned_.notify_all();
  }

  PageRecord& add(std::string name, std::uint64_t elements, Bytes element_size, const Lock& lock);
  void remove(PageRecord& page, const Lock& lock);
  /// By id; null where one has gone.
  std::span<PageRecord* const> pages(const Lock& /*lock*/) const noexcept { return by_id_; }
  DeadPages& dead_pages() noexcept { return dead_pages_; }

  void set_residency(PageRecord& page, Residency to, const Lock& lock);
  void pin(PageRecord& page, const Lock& lock) noexcept;
  void unpin(PageRecord& page, const Lock& lock) noexcept;
  /// After a change of what PageRecord::evictable() looks at.
  void recount(PageRecord& page, const Lock& lock) noexcept;
  /// The page has one more pending update.
  void add_pending_update(PageRecord& page, const Lock& lock) noexcept;
  /// `change` is made to what PageRecord::awaits_update() looks at.
  template <class Change>
  void change_version(PageRecord& page, const Lock& /*lock*/, const Change& change) {
    if (page.awaits_update()) --awaiting_;
    change();
    if (page.awaits_update()) ++awaiting_;
  }
  /// Home has seen all updates up to `version`.
  void set_version(PageRecord& page, std::uint64_t version, const Lock& lock);
  /// The page, if it is absent, can be fetched, which it could not before; or another one.
  void note_fetchable(const PageRecord& page, const Lock& lock);
  void note_change(const Lock& /*lock*/) noexcept { ++changes_; }
  bool any_absent(const Lock& /*lock*/) const noexcept { return absent_ > 0; }

  /// Who knows the future; null: nobody.
  void set_foresight(Foresight* foresight, const Lock& /*lock*/) { foresight_ = foresight; }
  Foresight* foresight(const Lock& /*lock*/) const noexcept { return foresight_; }
  PagerStats& stats(const Lock& /*lock*/) noexcept { return stats_; }

  // What a foresight sees, under the lock.
  Outlook page(PageId id) const override;
  std::span<const PageId> resident() const override { return resident_; }
  Bytes free() const override { return tiers_.arena().stats().largest_free; }
  Bytes evictable() const override { return spare_; }
  std::size_t awaiting_update() const override { return awaiting_; }
  std::uint64_t changes() const override { return changes_; }

 private:
  void lend(const Lock& lock) noexcept;
  void take_back(const Lock& lock) noexcept;
  PageRecord* mine(const Page& page) const noexcept;

  Tiers& tiers_;
  mutable RankedMutex<LockRank::PageTable> mutex_;
  Condition changed_;
  Condition unpinned_;
  std::uint32_t pin_waiters_ = 0;                   // guarded by mutex_
  std::vector<std::unique_ptr<PageRecord>> pages_;  // guarded by mutex_
  std::vector<PageRecord*> by_id_;                  // guarded by mutex_; parallel to pages_
  std::vector<PageId> resident_;                    // guarded by mutex_
  std::size_t absent_ = 0;                          // guarded by mutex_
  Bytes spare_ = 0;                                 // guarded by mutex_: bytes that may be evicted
  std::size_t awaiting_ = 0;                        // guarded by mutex_: awaits_update()
  std::uint64_t changes_ = 0;                       // guarded by mutex_
  Foresight* foresight_ = nullptr;                  // guarded by mutex_
  PagerStats stats_;                                // guarded by mutex_
  DeadPages dead_pages_;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/stream.h"
#include "pagoda/pager/device_copies.h"
#include "pagoda/pager/page_table.h"
#include "pagoda/pager/pager_options.h"
#include "pagoda/pager/pending_updates.h"

namespace pagoda::pager {

/// What pages are when they are not on the device: writes of user code come home, homes are cut,
/// read and filled. One at a time, through one stream and one staging buffer; `mutex_` comes before
/// the table's lock.
class Homes {
 public:
  using Lock = PageTable::Lock;
  using ReadPiece = std::function<void(std::span<const std::byte>)>;
  using WritePiece = std::function<void(std::span<std::byte>)>;

  Homes(PageTable& table, Tiers& tiers, const PagerOptions& options, DeviceCopies& copies);

  /// Whose masters follow what user code writes; null: nobody's.
  void set_pending_updates(PendingUpdates* updates, const Lock& /*lock*/) {
    pending_updates_ = updates;
  }
  PendingUpdates* pending_updates(const Lock& /*lock*/) const noexcept { return pending_updates_; }

  /// A new page's home, with the contents at `bytes` (null: blank).
  void create(PageRecord& page, Placement placement, const std::byte* bytes,
              device::Direction from);
  /// Writes a dirty page's bytes home; the page stays. The lock is open meanwhile.
  void write_back(PageRecord& page, Lock& lock);
  void write_back(PageRecord& page);
  /// Takes the page off the device; false if somebody has it pinned.
  bool evict(PageRecord& page);
  /// A fixed page is written in place: masters can only follow if what it held is kept. The page is
  /// pinned; the lock is open meanwhile.
  void keep_before(PageRecord& page, Lock& lock);
  /// The stream, or the host where that is null, goes on when all is there that was written to the
  /// resident copy: by the copy that brought it, by operators, and by kernels under a pin.
  void wait_for_writes(const PageRecord& page, device::Stream* stream);
  /// The stream of copy_in(), which goes on when those are done that use the resident copy, which
  /// is pinned.
  device::Stream& stream_behind_users(const PageRecord& page);
  /// The resident copy, which is pinned for that stream, becomes what is at `bytes` in device
  /// memory.
  void copy_in(PageRecord& page, const std::byte* bytes);
  /// Of the resident copy, which is pinned, or of this rank's own one.
  std::uint64_t checksum(const PageRecord& page, bool of_own_copy);
  /// What user code has written, and write_back() has kept apart, becomes what home has. True if
  /// there was something.
  bool publish(PageRecord& page, Lock& lock);
  /// Keeps these elements as the page's home: they are read by other ranks.
  void cut(PageRecord& page, Range range, Placement placement);
  /// Hands over elements that its home has, in pieces.
  void read(const PageRecord& page, Range elements, Bytes piece, const ReadPiece& read);
  /// All bytes of its home become what `write` fills in, in pieces.
  void write(PageRecord& page, Bytes piece, const WritePiece& write);
  void fill_blank(PageRecord& page);

 private:
  static void mark_users(const PageRecord& page);
  void store(PageRecord& page, const std::byte* from);
  void update_masters_of_fixed(PageRecord& page, const Home& kept_before);
  void update_masters(PageRecord& page, Range shard, Range written, const std::byte* after);
  template <class Work>
  void run_exclusive(PageRecord& page, Lock& lock, const Work& work);

  PageTable& table_;
  Tiers& tiers_;
  const PagerOptions& options_;
  DeviceCopies& copies_;
  PendingUpdates* pending_updates_ = nullptr;  // set while nobody writes
  RankedMutex<LockRank::Homes> mutex_;         // one at a time: they share a stream and a buffer
  std::shared_ptr<device::Stream> stream_;
  HostBlock staging_;
};

}  // namespace pagoda::pager

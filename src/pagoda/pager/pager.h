// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "pagoda/base/thread_pool.h"
#include "pagoda/device/stream.h"
#include "pagoda/pager/dropped_wait.h"
#include "pagoda/pager/foresight.h"
#include "pagoda/pager/lookup.h"
#include "pagoda/pager/page.h"
#include "pagoda/pager/pager_stats.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::pager {

/// A page that may move was about to be captured into a CUDA graph. Nothing else has happened.
class NotHeld : public UserError {
 public:
  using UserError::UserError;
};

/// A page and what an operator does with it.
struct Access {
  Page* page = nullptr;
  bool write = false;
};

/// An operator's pages do not fit into the device budget together. The message names them.
class OperatorTooLarge : public UserError {
 public:
  using UserError::UserError;
};

/// The pages of one rank: which are on the device, and how they come and go.
///
/// touch() brings an operator's pages in and pins them; unpin() lets them go again. In between,
/// fetch threads bring what the foresight expects and evict what it can spare. docs/notes/paging.md
/// tells the states and the order of things. All members may be called from any thread; one lock
/// guards every page, and nothing waits for bytes while holding it.
class Pager {
 public:
  struct Options {
    unsigned fetch_threads = 4;
    /// Host bytes each fetch thread may use on the way from disk or from other ranks.
    Bytes staging = 4_MiB;
    /// Pages of at least so many bytes have their rows looked up where they lie; 0: none.
    Bytes least_lookup = 0;
    int rank = 0;
    Sharding sharding;
    /// For messages: what the user writes to keep a page where raw pointers can see it.
    std::string pin_advice = "pin it (engine.pin)";
    DroppedWait dropped_wait = DroppedWait::None;
  };

  /// Buffers of Options::staging bytes that a pager takes: one for write-backs and, where the host
  /// cannot fill the device's memory itself, one for each fetch thread.
  static Bytes staging_buffers(device::DeviceKind kind, unsigned fetch_threads) noexcept {
    return 1 + (kind == device::DeviceKind::Host ? 0 : fetch_threads);
  }

  Pager(Tiers& tiers, Options options);
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;
  /// Waits for fetches under way. Pages still bound are unbound.
  ~Pager();
  /// The same, before what fetches need goes: drops those that have not begun. Nobody touches a
  /// page from now on.
  void stop_fetching() noexcept;

  /// Keeps a page resident and bound until release_hold(): for code that uses raw pointers. What it
  /// writes is found where the host can read the bytes; elsewhere only with `write`.
  void hold(Page& page, device::Stream* consumer, bool write = false);
  void release_hold(Page& page) noexcept;
  /// What raw pointers have written to pages that are held counts as written by user code.
  void find_raw_writes();

  /// What comes later than the pager: who knows the future, the debts, the other ranks. Set before
  /// the first touch that needs them; null for none.
  void set_foresight(Foresight* foresight);
  void set_debts(Debts* debts);
  void set_remote(RemoteShards* remote);

  /// A new page whose contents are at `bytes` in host-readable or device memory (null: blank), to
  /// be kept at `placement`. It is absent afterwards: its home has the contents.
  Page& adopt(std::string name, std::uint64_t elements, Bytes element_size, Placement placement,
              const std::byte* bytes, device::Direction from);
  /// Who is told where the page is from now on: at first, that it is absent.
  void set_binding(Page& page, Binding* binding);
  /// Forgets a page whose storage is gone. Its bytes are given back at the next call that may wait.
  void storage_died(Page& page) noexcept;
  /// …which is this one: no binding of a storage that has died is called after it.
  void bury_dead();
  /// Forgets a page; nobody touches it any more.
  void drop(Page& page);

  /// Brings every page in and pins it: until unpin() it stays where it is. With a `consumer` its
  /// stream waits for the bytes, otherwise this thread does. Throws what prevents it; nothing is
  /// pinned then.
  void touch(std::span<const Access> accesses, std::uint8_t mode, device::Stream* consumer);
  /// `consumer`: as in touch(); the pages may be evicted once its work so far is over.
  void unpin(std::span<const Access> accesses, device::Stream* consumer) noexcept;

  /// Bytes of the arena that a touch of these pages takes, beside those that live there.
  Bytes needed(std::span<const Access> accesses) const;
  /// After touch() threw: the storages of these pages throw `why` when the operator asks them for
  /// its bytes, until allow(). Pages that other operators run on stay as they are; those that want
  /// to on other threads wait.
  void deny(std::span<const Access> accesses, const std::string& why) noexcept;
  void allow(std::span<const Access> accesses) noexcept;

  /// Lets an operator read rows of a page where they lie, in host memory, however the device
  /// reaches it: the page's storage points there until end_lookup(), with these rows up to date.
  /// False: the page must be touched, for it lies elsewhere, or is better read on the device.
  bool begin_lookup(const Lookup& lookup, device::Stream* consumer);
  void end_lookup(Page& page, device::Stream* consumer) noexcept;

  /// From now on these pages have one more pending update: nobody sees them before updated().
  /// Returns when nobody reads their homes any more. Not while an operator runs on them. The
  /// result: those that raw pointers may read all the same, for user code holds them or keeps a
  /// view. They are to be refreshed before user code goes on.
  std::vector<Page*> owe(std::span<Page* const> pages);
  /// Returns when the pages are up to date where they are held.
  void refresh(std::span<Page* const> pages);
  /// Pages that live on the device and have no pending update can be read by raw pointers again.
  void bind_fixed();
  /// `page.home` has seen all updates up to `version`.
  void updated(Page& page, std::uint64_t version);

  /// The page's next version is being made before step(): true if it may be, for user code neither
  /// has written to the page nor holds it. Until step() the page can be read as ever.
  bool supersede(Page& page);
  void end_supersede(Page& page);
  /// `other`, of the same size and tier, has the page's next version, which is pending: it becomes
  /// the home, and takes what that was.
  void exchange_home(Page& page, Home& other);

  /// Returns when home has seen every update that it owes; throws once touches are refused.
  void await_version(const Page& page);

  /// The page's contents become those at `bytes`, in device memory, as if user code had written
  /// them.
  void overwrite(Page& page, const std::byte* bytes);
  /// Writes a dirty page's bytes to its home; the page stays. Waits.
  void write_back(Page& page);
  /// Takes the page off the device; false if somebody has it pinned. Waits for a write-back.
  bool evict(Page& page);
  /// What user code has written becomes what home has: other ranks see it, and masters follow. True
  /// if there was something. The ranks are between two steps.
  bool publish(Page& page);
  /// Keeps the shard of this rank, or all of it, as the page's home.
  void set_home_range(Page& page, Range range, Placement placement);
  /// Makes the resident copy the home: the page stays on the device for good.
  void fix(Page& page);

  using ReadPiece = std::function<void(std::span<const std::byte>)>;
  using WritePiece = std::function<void(std::span<std::byte>)>;
  /// Hands over the bytes of elements that its home has, what user code has written included, in
  /// pieces of at most `piece` bytes through the staging buffer. Nobody writes to the page.
  void read_home(Page& page, Range elements, Bytes piece, const ReadPiece& read);
  /// All bytes of its home become what `write` fills in, in pieces; copies elsewhere are dropped.
  /// Nobody uses the page.
  void write_home(Page& page, Bytes piece, const WritePiece& write);
  /// A page that was never written becomes the zeros that an operator would see: other ranks may
  /// read it.
  void fill_blank(Page& page);

  /// From now on every touch throws `why`, with the page's storage.
  void refuse(std::string why) noexcept;

  const Sharding& sharding() const noexcept { return options_.sharding; }
  Range shard_of(const Page& page) const noexcept {
    return options_.sharding.of(page.elements, options_.rank);
  }
  Tiers& tiers() noexcept { return tiers_; }
  PagerStats stats() const;
  /// The page, or null where it has gone.
  Page* find(PageId id) const;
  /// Pages alive, by id; null where one has gone.
  std::vector<Page*> pages() const;
  /// The lock that guards pages, for those who must look at several fields at once.
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }

  /// Counts who reads a home from outside the pager; an update waits for them. Returns how many
  /// updates the page shall have seen: with more than the home has, somebody is about to write.
  std::uint64_t add_reader(Page& page);
  void remove_reader(Page& page) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// A page whose storage throws `why`, for an operator of that thread.
  struct Denial {
    const Page* page;
    std::thread::id thread;
    std::string why;
  };

  /// What one fetch thread works with.
  struct Lane {
    std::shared_ptr<device::Stream> stream;
    HostBlock staging;
    bool busy = false;
  };

  Occupancy occupancy(const Lock& lock);
  Page* victim(PageId for_page, bool may_be_dirty, const Lock& lock);
  bool try_take_block(Page& page, const Lock& lock);
  bool take_block(Page& page, std::span<const Access> accesses, Lock& lock);
  bool others_will_free(std::span<const Access> accesses, const Lock& lock) const;
  bool take_blocks_afresh(std::span<const Access> accesses, Lock& lock);
  bool start_absent(std::span<const Access> accesses, Lock& lock);
  void await(Page& page, Lock& lock);
  void use(Page& page, bool write, std::uint8_t mode, device::Stream* consumer, const Lock& lock);
  void start_fetch(Page& page, Priority priority, const Lock& lock);
  void fetch(Page& page, std::uint64_t version);
  Lane& take_lane();
  void fill(const Page& page, std::byte* to, std::uint64_t version, Lane& lane);
  void fill_from(const Page& page, const Home& home, Range range, std::byte* to, Lane& lane);
  void fill_from_others(const Page& page, std::byte* to, std::uint64_t version, Lane& lane);
  void drop_copy(Page& page, const Lock& lock);
  void bind(Page& page, const Lock& lock);
  void note_raw_write(Page& page, const Lock& lock);
  void leave_lookup(Page& page) noexcept;
  device::Mark mark_or_wait(device::Stream& stream, const Lock& lock) noexcept;
  void refuse(std::string why, const Lock& lock) noexcept;
  void note_reading(Page& page, device::Mark mark, const Lock& lock) noexcept;
  static bool home_is_read(const Page& page, const Lock& lock) noexcept;
  void await_reads(Page& page, Lock& lock);
  void let_reads_end(Page& page, Lock& lock) noexcept;
  void keep_before(Page& page, Lock& lock);
  void write_back(Page& page, Lock& lock);
  void tell_fixed(Page& page);
  template <class Work>
  void alone_with(Page& page, Lock& lock, const Work& work);
  void store(Page& page, const std::byte* from);
  void tell_overwritten(Page& page, Range shard, Range written, const std::byte* after);
  void pump(const Lock& lock);
  void set_residency(Page& page, Residency to, const Lock& lock);
  void recount(Page& page, const Lock& lock) noexcept;
  void remove(Page& page, const Lock& lock);
  void bury(const Lock& lock);
  void unbind(Page& page, const Lock& lock);
  void unpin_all(std::span<const Access> accesses, const Lock& lock) noexcept;
  static void forget_pin(const Page& page) noexcept;
  void keep_held(Page& page, Lock& lock);
  /// A copy is over when it has been issued, and nobody needs to be told of waits.
  bool copies_at_once() const noexcept {
    return tiers_.device()->kind() == device::DeviceKind::Host &&
           tiers_.device()->checker() == nullptr;
  }
  void touch_held(std::span<const Access> accesses, const Lock& lock);
  bool denied_to_others(std::span<const Access> accesses, const Lock& lock) const;
  void await_copies(std::span<const Access> accesses);
  void tell_checker(std::span<const Access> accesses, device::Stream* consumer) const;
  [[noreturn]] void too_large(std::span<const Access> accesses) const;

  Tiers& tiers_;
  const Options options_;
  Foresight* foresight_ = nullptr;
  Debts* debts_ = nullptr;
  RemoteShards* remote_ = nullptr;

  mutable std::mutex mutex_;
  std::condition_variable changed_;           // a page changed state, was unpinned or unread
  std::vector<std::unique_ptr<Page>> pages_;  // guarded by mutex_
  std::vector<Page*> by_id_;                  // guarded by mutex_; parallel to pages_
  std::vector<Lane> lanes_;                   // `busy` guarded by mutex_
  std::uint64_t sequence_ = 0;                // guarded by mutex_
  std::uint32_t fetching_ = 0;                // guarded by mutex_
  std::size_t absent_ = 0;                    // guarded by mutex_
  std::vector<PageId> resident_;              // guarded by mutex_
  Bytes spare_ = 0;                           // guarded by mutex_: bytes that may be evicted
  std::size_t owing_ = 0;                     // guarded by mutex_: pages that owe an update
  std::uint64_t changes_ = 0;                 // guarded by mutex_: of what could be fetched
  Nanos stalled_ = 0;                         // guarded by mutex_: since the last touch
  std::uint32_t starved_ = 0;                 // guarded by mutex_: touches waiting for room
  std::string refused_;                       // guarded by mutex_; empty: all is well
  std::vector<Denial> denials_;               // guarded by mutex_; empty, but for moments
  PagerStats stats_;                          // guarded by mutex_
  std::atomic<bool> any_dead_{false};
  std::mutex graveyard_mutex_;    // a leaf: storages die anywhere
  std::vector<Page*> graveyard_;  // guarded by graveyard_mutex_

  // Blocks are taken for this stream, which has no work: its mark is what a lane waits for before
  // it overwrites what others may still be reading.
  std::shared_ptr<device::Stream> room_stream_;
  std::mutex write_mutex_;  // one write-back at a time: they share a stream and a buffer
  std::shared_ptr<device::Stream> write_stream_;
  HostBlock write_staging_;
  ThreadPool fetchers_;  // last: its threads use all of the above
};

}  // namespace pagoda::pager

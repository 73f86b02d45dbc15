// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagoda/device/stream.h"
#include "pagoda/pager/access.h"
#include "pagoda/pager/binding.h"
#include "pagoda/pager/foresight.h"
#include "pagoda/pager/lookup.h"
#include "pagoda/pager/page.h"
#include "pagoda/pager/pager_options.h"
#include "pagoda/pager/pager_stats.h"
#include "pagoda/pager/pending_updates.h"
#include "pagoda/pager/pin.h"
#include "pagoda/pager/remote_shards.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::pager {

/// The pages of one rank: which are on the device, and how they come and go.
///
/// touch() brings an operator's pages in and pins them, until the pin goes. In between, fetch
/// threads bring what the foresight expects and evict what it can spare. docs/notes/paging.md tells
/// the states and the order of things, and which class of this folder does what. All members may be
/// called from any thread; one lock guards every page, and nothing waits for bytes while holding
/// it.
class Pager {
 public:
  using Options = PagerOptions;

  /// Buffers of Options::staging bytes that a pager takes: one for write-backs and, where the host
  /// cannot fill the device's memory itself, one for each fetch thread.
  static Bytes staging_buffers(device::DeviceKind kind, unsigned fetch_threads) noexcept {
    return 1 + (kind == device::DeviceKind::Host ? 0 : fetch_threads);
  }

  /// Bytes that each page takes beside its own, while it lives.
  static Bytes bookkeeping() noexcept;

  Pager(Tiers& tiers, Options options);
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;
  /// Waits for fetches and operators under way. Pages still bound are unbound.
  ~Pager();
  /// The same, before what fetches need goes: drops those that have not begun. Nobody touches a
  /// page from now on.
  void stop_fetching() noexcept;

  /// What comes later than the pager: who knows the future, pending updates, other ranks. Set
  /// before the first touch that needs them; null for none.
  void set_foresight(Foresight* foresight);
  void set_pending_updates(PendingUpdates* updates);
  void set_remote(RemoteShards* remote);

  /// A new page whose contents are at `bytes` in host-readable or device memory (null: blank), to
  /// be kept at `placement`. It is absent afterwards: its home has the contents.
  Page& adopt(std::string name, std::uint64_t elements, Bytes element_size, Placement placement,
              const std::byte* bytes, device::Direction from);
  void rename(Page& page, std::string name);
  /// Who is told where the page is from now on: at first, that it is absent.
  void set_binding(Page& page, Binding* binding);
  /// Gradients and state refer to the page: it stays, also if its storage dies.
  void set_attached(Page& page, bool attached);
  /// Forgets a page whose storage is gone. Its bytes are given back at the next call that may wait.
  void storage_died(Page& page) noexcept;
  /// …which is this one: no binding of a storage that has died is called after it.
  void drop_dead_pages();
  /// Forgets a page, when operators that have it have ended; nobody touches it any more.
  void drop(Page& page);

  /// Brings every page in and pins it. With a `consumer` its stream waits for the bytes, otherwise
  /// this thread does; the pages may be evicted once the consumer's work until the end of the pin
  /// is over. Throws what prevents it; nothing is pinned then.
  [[nodiscard]] Pin touch(std::span<const Access> accesses, std::uint8_t mode,
                          device::Stream* consumer);
  /// Keeps a page resident and bound: for code that uses raw pointers. What it writes is found
  /// where the host can read the bytes; elsewhere only with `write`.
  [[nodiscard]] Hold hold(Page& page, device::Stream* consumer, bool write = false,
                          RawWrites writes = RawWrites::Count);
  /// Lets an operator read rows of a page where they lie, in host memory, however the device
  /// reaches it: the page's storage points there while the pin lives, with these rows up to date.
  /// No pin: the page must be touched, for it lies elsewhere, or is better read on the device.
  [[nodiscard]] Pin look_up(const Lookup& lookup, device::Stream* consumer);
  /// Counts who reads a home from outside the pager; an update waits for them.
  [[nodiscard]] HomeReader read(Page& page);

  /// Whether an operator of the calling thread has the page.
  static bool pinned_by_this_thread(const Page& page) noexcept;
  /// …or any page, of any pager.
  static bool any_pinned_by_this_thread() noexcept;
  /// Returns when no operator of another thread has the page, or is about to throw because of it.
  /// Nobody touches it from now on.
  void wait_until_unused(Page& page);

  /// Bytes of the arena that a touch of these pages takes, beside those that live there.
  Bytes needed(std::span<const Access> accesses) const;
  /// Whether a page of the same size can be brought in beside this one, now that so many pages are
  /// held or live on the device.
  bool has_room_beside(const Page& page) const;
  /// Whether nobody has the page, or is denied it: drop() would not wait for operators.
  bool is_unused(const Page& page) const;
  /// Returns when all that was written to the resident copy of this page is there. Pinned.
  void wait_for_writes(const Page& page);
  /// After touch() threw: the storages of these pages throw `why` when the operator asks them for
  /// its bytes, until allow(). Returns when no operator of another thread runs on them; those that
  /// want to wait.
  void deny(std::span<const Access> accesses, const std::string& why) noexcept;
  void allow(std::span<const Access> accesses) noexcept;
  /// From now on every touch throws `why`, with the page's storage.
  void refuse(std::string why) noexcept;

  /// What `stream` has been given may use every page that stays where it is, without an operator
  /// that said so: a CUDA graph that is replayed, a kernel under a pin. Before mark_pending().
  void note_user(device::Stream& stream);
  /// From now on these pages have one more pending update: nobody sees them before updated().
  /// Returns when nobody reads their homes any more. Not while an operator runs on them. The
  /// result: those that raw pointers may read all the same, for user code holds them or keeps a
  /// view. They are to be refreshed before user code goes on.
  std::vector<Page*> mark_pending(std::span<Page* const> pages);
  /// Returns when the pages are up to date where they are held.
  void refresh(std::span<Page* const> pages);
  /// Pages that live on the device and have no pending update can be read by raw pointers again.
  void bind_fixed();
  /// The page's home has seen all updates up to `version`.
  void updated(Page& page, std::uint64_t version);
  /// Returns when home has seen every pending update; throws once touches are refused.
  void wait_for_version(const Page& page);

  /// The page's next version is being made before step(): true if it may be, for user code neither
  /// has written to the page nor holds it. Until step() the page can be read as ever.
  bool supersede(Page& page);
  void end_supersede(Page& page);
  /// `next` has the whole next version of a superseded page: what is fetched ahead comes from
  /// there, though nobody sees it before mark_pending(). It stays until then or until
  /// withdraw_next(), which returns when nobody reads it.
  void offer_next(Page& page, const Home& next);
  void withdraw_next(Page& page);
  /// `other`, of the same size and tier, has the page's next version, which is pending: it becomes
  /// the home, and takes what that was.
  void exchange_home(Page& page, Home& other);
  /// The page's home, for whoever makes its next version, from mark_pending() or supersede() until
  /// updated(), and between two steps: nobody else changes it meanwhile.
  static Home& home(Page& page) noexcept;
  static const Home& home(const Page& page) noexcept;
  /// The elements that home has: this rank's shard, or all.
  static Range home_range(const Page& page) noexcept;

  /// The page's contents become those at `bytes`, in device memory, as if user code had written
  /// them.
  void overwrite(Page& page, const std::byte* bytes);
  /// Pages that user code has written to since they were last published.
  struct Written {
    std::vector<Page*> pages;
    bool shared = false;  // other ranks read one of them
  };
  Written written();
  /// What raw pointers have written to pages that are held counts as written by user code: reads
  /// the bytes of all of them.
  void find_raw_writes();
  /// Of each of these pages: whether user code has written to it since the last call of the second.
  std::vector<bool> written_by_user(std::span<Page* const> pages) const;
  void forget_user_writes(std::span<Page* const> pages);
  /// Of the page's bytes as operators of this rank see them: brings it to the device, unless it was
  /// written and evicted.
  std::uint64_t checksum(Page& page);
  /// Pages that raw pointers have written to where their hold says that this is told, or refused.
  std::vector<std::string> take_reported_writes();
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

  const Sharding& sharding() const noexcept { return options_.sharding; }
  Range shard_of(const Page& page) const noexcept {
    return options_.sharding.of(page.elements, options_.rank);
  }
  Tiers& tiers() noexcept { return tiers_; }
  PagerStats stats() const;
  PageSnapshot look(const Page& page) const;
  /// Touches until the next expected use of each.
  std::vector<std::size_t> next_uses(std::span<Page* const> pages) const;

 private:
  friend class Pin;
  friend class Hold;
  friend class HomeReader;
  struct Parts;

  void unpin(std::span<const Access> accesses, device::Stream* consumer) noexcept;
  void release_hold(Page& page) noexcept;
  /// Until neither another rank nor an early update still has to read what it holds now.
  void wait_until_writable(Page& page);
  void end_lookup(Page& page, device::Stream* consumer) noexcept;
  void remove_reader(Page& page) noexcept;

  Tiers& tiers_;
  const Options options_;
  std::unique_ptr<Parts> parts_;
};

}  // namespace pagoda::pager

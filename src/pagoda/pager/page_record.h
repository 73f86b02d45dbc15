// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <cstdint>
#include <exception>
#include <forward_list>
#include <string>
#include <utility>
#include <vector>

#include "pagoda/device/block.h"
#include "pagoda/device/stream.h"
#include "pagoda/pager/binding.h"
#include "pagoda/pager/home.h"
#include "pagoda/pager/page.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::pager {

/// What the storage of a page shows to whoever uses its pointer.
enum class Exposure : std::uint8_t {
  None,    ///< no bytes: it throws
  Shut,    ///< it points at them and throws all the same, for no operator runs on the page
  Pointer  ///< the bytes
};

/// What is known of a page that user code holds, to find what it writes by raw pointers.
struct Held {
  bool for_write = false;  // by kernels: the host cannot find out by itself
  RawWrites writes = RawWrites::Count;
  /// Of the bytes, where the host can read them.
  std::uint64_t sum = 0;
  /// …and they themselves, where such writes are refused.
  Home copy;
};

/// A page with all that changes of it, guarded by the lock of its PageTable. What every touch and
/// every look ahead needs lies together: with thousands of pages, each cache line costs.
struct alignas(64) PageRecord final : Page {
  PageRecord(PageId page_id, std::string page_name, std::uint64_t count, Bytes size)
      : Page(page_id, nullptr, count, size) {
    rename(std::move(page_name));
  }

  /// Of a copy whose overwrite in place failed, and of what is none.
  static constexpr std::uint64_t kNoVersion = ~std::uint64_t{0};

  Residency residency = Residency::Absent;
  Contents contents = Contents::Blank;
  /// Its next version is being made before step() asks for it: a copy of this one will hardly be
  /// used, and is not fetched ahead. The next one is, from `next`, once it lies there.
  bool superseded = false;
  /// Home and resident copy are one: the page lives on the device and never leaves.
  bool fixed = false;
  /// …and a CUDA graph has its address, which replays without a touch.
  bool captured = false;
  Exposure exposure = Exposure::None;
  bool usual_message = false;  // its storage throws how to read it, and no other error
  bool prefetched = false;     // came by prefetch and was not used yet
  bool spare = false;          // counted among the bytes that may be evicted
  bool dead = false;           // its storage is gone
  std::uint32_t pins = 0;      // operators in flight, and holds
  std::uint32_t holds = 0;     // of these, the user's
  std::uint32_t lent = 0;      // of these, those of operators that wait: PageTable::wait_lending()
  /// Updates that home has seen, undone ones included, and that it must have seen before anybody
  /// may look.
  std::uint64_t version = 0;
  std::uint64_t wanted = 0;

  std::uint64_t last_touch = 0;  // position in the sequence of touches
  std::uint32_t readers = 0;     // of home, outside the pager
  std::uint32_t lookups = 0;     // operators in flight that read home: its storage points there
  std::uint32_t place = 0;       // in the table's list of resident pages
  bool attached = false;         // gradients and state refer to it: it stays until they go
  /// Other ranks read `home`: a shard, which of a small page may be all of it.
  bool shared = false;
  bool user_wrote = false;  // since Pager::forget_user_writes()
  Binding* binding = nullptr;
  std::exception_ptr fetch_error;
  /// The version that another rank has gone on from, which `fetch_error` says: nothing has failed.
  std::uint64_t gone = kNoVersion;
  device::Mark ready;

  device::Block block;
  /// The bytes when the page is not on the device: all of it, or this rank's shard.
  Home home;
  Range home_range;
  /// The whole page as this rank's user code has written it, while `home` still has what the last
  /// update left, for other ranks and for masters to compare with; until Homes::publish().
  Home own_copy;
  /// All of the next version, from when it is complete until step() asks for it. A copy that was
  /// fetched ahead from here is no touch's before that: its resident_version is larger than wanted.
  const Home* next = nullptr;
  /// What a fixed page held when user code began to write to it, until masters have followed.
  Home before;
  std::uint64_t resident_version = 0;  // or kNoVersion
  Held held;
  device::Mark written;  // behind the last operator on a stream that wrote it
  /// Behind what streams have been given that reads home, beside the copy that `ready` is behind:
  /// lookups, and copies to where the page has been dropped from since.
  std::vector<device::Mark> reading;

  /// Under the lock; whoever has the former name keeps it.
  void rename(std::string to) {
    names_.push_front(std::move(to));
    name_.store(&names_.front(), std::memory_order_release);
  }

  /// Its bytes on the device, when it is there.
  const device::Block& device_block() const noexcept { return fixed ? home.block() : block; }
  bool dirty() const noexcept { return contents == Contents::Dirty; }
  bool blank() const noexcept { return contents == Contents::Blank; }
  /// What user code wrote has come home, or nobody wants it any more.
  void clean() noexcept {
    if (dirty()) contents = Contents::Clean;
  }
  /// Home has been written.
  void fill() noexcept {
    if (blank()) contents = Contents::Clean;
  }
  /// User code has written something that home does not have.
  bool has_writes() const noexcept { return dirty() || own_copy; }
  /// On its way in or out: nobody else may take it yet.
  bool moving() const noexcept {
    return residency == Residency::Fetching || residency == Residency::Leaving;
  }
  /// Its block may be given to another page.
  bool evictable(bool may_be_dirty) const noexcept {
    return residency == Residency::Resident && pins == 0 && !fixed && (may_be_dirty || !dirty());
  }
  /// An operator runs on it, of another thread unless this one has lent its pins.
  bool in_use() const noexcept { return pins > holds + lent; }
  bool whole_home() const noexcept { return home_range.size() == elements; }
  bool has_pending_update() const noexcept { return version < wanted; }
  /// A fetch would bring what is out of date soon, or has to wait.
  bool awaits_update() const noexcept {
    return has_pending_update() || (superseded && next == nullptr) || outdated();
  }
  /// Its last fetch has failed: whoever touches it next hears of that.
  bool failed() const noexcept { return fetch_error != nullptr && gone == kNoVersion; }
  /// Other ranks do not have its version any more: the step() that they are in comes here, too.
  bool outdated() const noexcept { return gone == wanted; }
  bool spoiled() const noexcept { return resident_version == kNoVersion; }
  /// The copy on the device, if there is one, is of the version that anybody may see.
  bool current() const noexcept { return fixed || resident_version == wanted; }

 private:
  std::forward_list<std::string> names_;  // the latest first
};

inline PageRecord& record_of(Page& page) noexcept {
  return static_cast<PageRecord&>(page);
}

inline const PageRecord& record_of(const Page& page) noexcept {
  return static_cast<const PageRecord&>(page);
}

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "pagoda/base/clock.h"
#include "pagoda/device/block.h"
#include "pagoda/device/stream.h"
#include "pagoda/pager/home.h"
#include "pagoda/pager/sharding.h"

namespace pagoda::pager {

using PageId = std::uint32_t;
inline constexpr PageId kNoPage = ~PageId{0};

/// Whether the whole page is on the device. What each state costs there is in brackets.
enum class Residency : std::uint8_t {
  Absent,    ///< its storage throws on access [nothing]
  Fetching,  ///< being brought in by a fetch thread [the page]
  Resident,  ///< complete once `ready` has passed [the page]
  Leaving,   ///< being written back to its home [the page, until that is over]
};

/// The other side of a page: whoever must learn where its bytes are now (torch's storages). Called
/// under the pager's lock, from the thread that touches or evicts; must not call the pager.
class Binding {
 public:
  virtual ~Binding() = default;
  /// The page is at `data` until unbind().
  virtual void bind(std::byte* data) noexcept = 0;
  /// The page is absent: an access shall throw `why`.
  virtual void unbind(const std::string& why) noexcept = 0;
  /// Whether others than the parameters themselves share the bytes: a view that user code keeps may
  /// be read without anybody being told.
  virtual bool has_views() const noexcept { return false; }
};

/// The storage of one parameter, or of several that are views of it. A record: the Pager guards all
/// that is not const, with its lock. What every touch looks at lies together: with thousands of
/// pages, each cache line costs.
struct alignas(64) Page {
  Page(PageId page_id, std::string page_name, std::uint64_t count, Bytes size)
      : id(page_id), elements(count), element_size(size), name(std::move(page_name)) {}

  const PageId id;
  Residency residency = Residency::Absent;
  /// Its next version is being made before step() asks for it: a copy of this one will hardly be
  /// used, and is not fetched ahead.
  bool superseded = false;
  /// Home and resident copy are one: the page lives on the device and never leaves.
  bool fixed = false;
  bool bound = false;
  bool dirty = false;       // written by user code since it came, or since the last write-back
  bool prefetched = false;  // came by prefetch and was not used yet
  bool spare = false;       // counted among the bytes that may be evicted
  /// Home has never been written: a page that was born and not yet initialised.
  bool blank = true;
  bool dead = false;          // its storage is gone
  bool attached = false;      // gradients and state refer to it: it stays until they go
  std::uint32_t pins = 0;     // operators in flight, and holds
  std::uint32_t holds = 0;    // of these, the user's
  std::uint32_t readers = 0;  // of home, outside the pager
  std::uint32_t lookups = 0;  // operators in flight that read home: its storage points there
  std::uint32_t place = 0;    // in the pager's list of resident pages
  /// Updates that home has seen, undone ones included, and that it must have seen before anybody
  /// may look.
  std::uint64_t version = 0;
  std::uint64_t wanted = 0;
  std::uint64_t last_touch = 0;  // position in the sequence of touches
  const std::uint64_t elements;
  const Bytes element_size;
  Binding* binding = nullptr;
  std::exception_ptr fetch_error;
  device::Mark ready;

  device::Block block;
  std::string name;  // renamed once the model's own name for it is known
  /// The bytes when the page is not on the device: all of it, or this rank's shard.
  Home home;
  Range home_range;
  /// Other ranks read `home`: a shard, which of a small page may be all of it.
  bool shared = false;
  /// The whole page as this rank's user code has written it, while `home` still has what the last
  /// update left, for other ranks and for masters to compare with; until Pager::publish().
  Home own_copy;
  /// What a fixed page held when user code began to write to it, until masters have followed.
  Home before;
  std::uint64_t resident_version = 0;
  /// Of its bytes while it is held, where the host can read them: finds writes by raw pointers.
  std::uint64_t held_sum = 0;
  bool held_for_write = false;  // …where it cannot
  device::Mark written;         // behind the last operator on a stream that wrote it
  /// Behind what streams have been given that reads home, beside the copy that `ready` is behind:
  /// lookups, and copies to where the page has been dropped from since.
  std::vector<device::Mark> reading;

  Bytes bytes() const noexcept { return elements * element_size; }
  /// Its bytes on the device, when it is there.
  const device::Block& device_block() const noexcept { return fixed ? home.block() : block; }
  /// On its way in or out: nobody else may take it yet.
  bool moving() const noexcept {
    return residency == Residency::Fetching || residency == Residency::Leaving;
  }
  /// Its block may be given to another page.
  bool evictable(bool may_be_dirty) const noexcept {
    return residency == Residency::Resident && pins == 0 && !fixed && (may_be_dirty || !dirty);
  }
  bool whole_home() const noexcept { return home_range.size() == elements; }
  bool owes() const noexcept { return version < wanted; }
  /// A fetch would bring what is out of date soon, or has to wait.
  bool awaited() const noexcept { return owes() || superseded; }
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "pagoda/base/bytes.h"
#include "pagoda/pager/sharding.h"
#include "pagoda/pager/tier.h"

namespace pagoda::pager {

using PageId = std::uint32_t;
inline constexpr PageId kNoPage = ~PageId{0};

/// Whether the whole page is on the device. What each state costs there is in brackets.
enum class Residency : std::uint8_t {
  Absent,    ///< nothing is on the device [nothing]
  Fetching,  ///< being brought in by a fetch thread [the page]
  Resident,  ///< complete once the copy that brings it has passed [the page]
  Leaving,   ///< being written back to its home [the page, until that is over]
};

/// What has become of a page's values since its home last had them.
enum class Contents : std::uint8_t {
  Blank,  ///< born and never written: home holds nothing yet
  Clean,  ///< home has them
  Dirty,  ///< user code has written to the resident copy
};

/// What becomes of writes by raw pointers to a page that is held. A host can find them alone.
enum class RawWrites : std::uint8_t {
  Count,   ///< as those of operators do
  Report,  ///< they count, and Pager::take_reported_writes() names the page
  Refuse,  ///< they are undone, and it names the page
};

/// The storage of one parameter, or of several that are views of it: what anybody may know of it at
/// any time. What changes is the pager's own (page_record.h); Pager::look() gives a copy of it, and
/// pins, holds and readers keep it from changing.
class Page {
 public:
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  const PageId id;
  const std::uint64_t elements;
  const Bytes element_size;

  Bytes bytes() const noexcept { return elements * element_size; }
  /// The model's name for it, once that is known. Stays good while the page lives.
  const std::string& name() const noexcept { return *name_.load(std::memory_order_acquire); }

 protected:
  Page(PageId page_id, const std::string* page_name, std::uint64_t count, Bytes size)
      : id(page_id), elements(count), element_size(size), name_(page_name) {}
  ~Page() = default;

  std::atomic<const std::string*> name_;
};

/// What the pager knows of a page: a copy, as of one moment.
struct PageSnapshot {
  Residency residency = Residency::Absent;
  Contents contents = Contents::Blank;
  bool fixed = false;  // home and resident copy are one: the page lives on the device
  Tier home_tier = Tier::Host;
  Range home_range;  // elements that home has
  std::uint64_t version = 0;
  std::uint64_t wanted = 0;
  std::uint32_t pins = 0;
  std::uint32_t holds = 0;
  std::uint32_t readers = 0;
  std::uint32_t lookups = 0;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "pagoda/base/bytes.h"
#include "pagoda/pager/foresight.h"
#include "pagoda/prefetch/fetch_rate.h"
#include "pagoda/prefetch/predictor.h"

namespace pagoda::prefetch {

/// Decides which page to fetch and which to evict. Holds no state: it is made of references, and
/// each answer is that of the moment. One thread at a time: the caller holds its lock.
class Schedule {
 public:
  struct Options {
    /// A fetch that needs room starts when the time from the next touch (where this is asked again)
    /// until the page is used is at most so many times what the fetches until then take.
    double slack = 2;
  };

  Schedule(const Predictor& predictor, const pager::Occupancy& arena, const FetchRate& rate)
      : Schedule(predictor, arena, rate, Options{}) {}
  Schedule(const Predictor& predictor, const pager::Occupancy& arena, const FetchRate& rate,
           const Options& options)
      : predictor_(predictor), arena_(arena), rate_(rate), options_(options) {}

  /// For how long there is nothing to fetch, as long as the program does what is expected and no
  /// page comes or goes: looking costs time that grows with what is known.
  struct Pause {
    std::size_t touches = 0;
    Nanos time = 0;
  };

  /// The absent page to fetch now, if any; `pause` (may be null) is set if there is none. Pages are
  /// fetched in the order of their use. The next one starts at once when it fits into what is free,
  /// less what pending pages before it will take; when room must be made, only as late as the
  /// deadlines of all that comes allow, and never by evicting what is used before it: as long as it
  /// does not fit, choose_victim() then names pages that are used later, or not at all.
  std::optional<PageId> next_fetch(Pause* pause = nullptr) const;

  /// The page to evict: of those that are resident, not in use, not in `exclude` and not dirty
  /// unless they may be, one without an expected use, the least recently touched first; else the
  /// one that is used furthest from now.
  std::optional<PageId> choose_victim(std::span<const PageId> exclude = {},
                                      bool may_be_dirty = false) const;

 private:
  const Predictor& predictor_;
  const pager::Occupancy& arena_;
  const FetchRate& rate_;
  Options options_;
};

}  // namespace pagoda::prefetch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "pagoda/pager/foresight.h"
#include "pagoda/prefetch/fetch_rate.h"
#include "pagoda/prefetch/predictor.h"
#include "pagoda/prefetch/schedule.h"

namespace pagoda::prefetch {

/// The pager's foresight: the predictor knows what comes, the schedule what to do about it. Called
/// under the pager's lock.
class Oracle final : public pager::Foresight {
 public:
  Oracle() = default;

  void touched(pager::PageId page, std::uint8_t mode, Nanos now) override;
  void stalled(Nanos wait) override;
  void forget(pager::PageId page) override;
  void absent(pager::PageId page) override;
  void fetched(Bytes bytes, double seconds) override;
  pager::PageId next_fetch(const pager::Occupancy& occupancy) override;
  pager::PageId victim(const pager::Occupancy& occupancy, pager::PageId for_page,
                       bool may_be_dirty) override;

  std::size_t next_use(pager::PageId page) const override {
    return predictor_.next_use(page).value_or(std::numeric_limits<std::size_t>::max());
  }
  Predictor::Stats stats() const { return predictor_.stats(); }
  const FetchRate& rate() const noexcept { return rate_; }

 private:
  /// Until when nothing can start that was not started before.
  struct Quiet {
    std::uint64_t changes = ~std::uint64_t{0};
    std::uint64_t surprises = 0;
    std::uint64_t position = 0;
    Nanos time = 0;
  };

  std::size_t find_absent(const pager::Occupancy& occupancy);

  Predictor predictor_;
  FetchRate rate_;
  Nanos now_ = 0;  // of the last touch
  Quiet quiet_;
  // No page that is expected before this touch was absent when it was last looked at.
  std::uint64_t first_absent_ = 0;
  std::uint64_t looked_after_ = 0;  // surprises until then
};

}  // namespace pagoda::prefetch

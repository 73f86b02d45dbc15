// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <vector>

#include "pagoda/pager/foresight.h"

namespace pagoda::pager {

/// Wants these pages fetched ahead, one after the other.
class WantsPages final : public Foresight {
 public:
  void want(std::vector<PageId> pages) { pages_ = {pages.begin(), pages.end()}; }
  void touched(PageId /*page*/, std::uint8_t /*mode*/, Nanos /*now*/) override {}
  void stalled(Nanos /*wait*/) override {}
  void forget(PageId /*page*/) override {}
  void fetched(Bytes /*bytes*/, double /*seconds*/) override {}
  PageId next_fetch(const Occupancy& occupancy) override {
    awaiting_update_ = occupancy.awaiting_update();
    if (pages_.empty()) return kNoPage;
    const PageId out = pages_.front();
    pages_.pop_front();
    return out;
  }
  PageId victim(const Occupancy& /*occupancy*/, PageId /*for_page*/, bool /*dirty*/) override {
    return kNoPage;
  }
  /// What the pager has said when it asked last, on the thread that made it ask.
  std::size_t awaiting_update() const { return awaiting_update_; }

 private:
  std::deque<PageId> pages_;         // guarded by the pager's lock
  std::size_t awaiting_update_ = 0;  // guarded by the pager's lock
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pagoda/base/clock.h"

namespace pagoda::prefetch {

/// A page by its number. Numbers are small and dense: tables are indexed by them.
using PageId = std::uint32_t;

/// An operator is about to use a page. The mode (gradients on, backward, …) belongs to the symbol:
/// a weight in forward is followed by other pages than the same weight in backward.
struct Touch {
  PageId page = 0;
  std::uint8_t mode = 0;

  friend bool operator==(const Touch&, const Touch&) = default;
};

/// A touch that is to come.
struct Expected {
  Touch touch;
  /// How often in a row the prediction behind it came true, up to kSure. 1: seen once, or unlike
  /// the time before.
  std::uint8_t strength = 0;
  /// Time from the current touch until this one, without stalls.
  Nanos in = 0;
};

inline constexpr std::uint8_t kSure = 3;

}  // namespace pagoda::prefetch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "pagoda/kernels/element.h"
#include "pagoda/kernels/isa.h"

namespace pagoda::kernels {

/// What memory allows a kernel: a loop that moves the same bytes and computes nothing.
///
/// Holds pointers only. Any thread may run any range; ranges that do not overlap may run at once.
/// Arrays are aligned to 64 bytes. Elements that are updated keep their values, those written
/// become zero.
class BandwidthProbe {
 public:
  struct Streams {
    std::vector<ConstElements> read;
    std::vector<Elements> update;  ///< read and written in place
    std::vector<Elements> write;
  };
  /// Which of the ways to move them; the limit is the best of all.
  struct Style {
    bool prefetch;  ///< ask for lines ahead
    bool stream;    ///< write past the caches
  };

  /// Throws UserError for a set of streams that no kernel has.
  explicit BandwidthProbe(Streams streams);

  /// Moves elements [begin, end), both multiples of 32.
  void run(std::size_t begin, std::size_t end, Style style, Isa isa = active_isa()) const;

 private:
  Streams streams_;
};

}  // namespace pagoda::kernels

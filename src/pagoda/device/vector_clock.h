// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagoda::device {

/// What one actor (a stream or a host thread) knows to have happened: for each actor, the number of
/// its operations that are certainly over. A value; not thread-safe.
class VectorClock {
 public:
  /// How many operations of `actor` are known to be over.
  std::uint64_t at(std::size_t actor) const noexcept {
    return actor < times_.size() ? times_[actor] : 0;
  }
  /// A new operation of `actor`, which owns this clock; returns its number.
  std::uint64_t tick(std::size_t actor) {
    if (actor >= times_.size()) times_.resize(actor + 1);
    return ++times_[actor];
  }
  /// Learns all that `other` knows.
  void join(const VectorClock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) {
      times_[i] = std::max(times_[i], other.times_[i]);
    }
  }

 private:
  std::vector<std::uint64_t> times_;
};

}  // namespace pagoda::device

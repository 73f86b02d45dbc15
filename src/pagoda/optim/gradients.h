// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pagoda/base/thread_pool.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::optim {

/// Adds up gradients where they live: over ranks in rank order in fp32, over micro-batches in the
/// accumulator's type ("Reduction" in docs/notes/numerics.md). One thread at a time.
class Gradients {
 public:
  struct Options {
    /// The sum over ranks is multiplied by it: 1 for a sum, 1 ÷ ranks for a mean.
    float scale = 1;
    /// Keep the sums of squares of what has been added up: for clipping and for overflow.
    bool squares = false;
    /// Host buffer for accumulators that are not in memory.
    Bytes staging = 4_MiB;
  };

  Gradients(pager::Tiers& tiers, ThreadPool& pool, Options options);
  /// Before the first gradient: what Options::squares says.
  void keep_squares(bool keep) noexcept { options_.squares = keep; }

  /// Adds elements [begin, begin + count) of `page`: `ranks` has each rank's gradient of them in
  /// the page's type, or null for none. `present` tells, for each parameter of the page, whether
  /// any rank has a gradient. `begin` is a multiple of 4096 from page.reduced.begin on.
  void add(TrainedPage& page, std::uint64_t begin, std::uint64_t count,
           std::span<const std::byte* const> ranks, const std::vector<bool>& present);
  /// Where one rank's gradient may be put as it is, for it is the sum: the first of its step, in
  /// the accumulator's own type. Null: it must be added. taken() follows.
  std::byte* take_as_is(TrainedPage& page, const std::vector<bool>& present) noexcept;
  void taken(TrainedPage& page, const std::vector<bool>& present);
  /// All of a micro-batch's elements have been added.
  void added(TrainedPage& page, const std::vector<bool>& present);
  /// The parameter's gradient, if it has one, is as if it had never come; others stay.
  void forget(TrainedPage& page, std::uint32_t parameter);
  /// The step is over: accumulators start anew.
  static void clear(TrainedPage& page) noexcept;

  /// Reads elements of page.gradient_range as fp32; zeros where there is no gradient.
  void read(const TrainedPage& page, std::uint64_t begin, std::span<float> to);
  /// Takes the sums of squares of what has been added up, where they are not kept.
  void measure(TrainedPage& page);
  /// Options::staging bytes, for whoever calls between two of the above.
  std::span<std::byte> scratch() noexcept { return {staging_.data(), options_.staging}; }

 private:
  void add_piece(TrainedPage& page, std::uint64_t begin, std::uint64_t count,
                 std::span<const std::byte* const> ranks, const std::vector<bool>& present,
                 std::byte* accumulator);

  pager::Tiers& tiers_;
  ThreadPool& pool_;
  Options options_;
  pager::HostBlock staging_;
};

}  // namespace pagoda::optim

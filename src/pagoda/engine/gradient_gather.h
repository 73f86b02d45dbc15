// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "pagoda/base/bytes.h"
#include "pagoda/comm/group.h"
#include "pagoda/optim/gradients.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// Brings together what each rank has of the gradients: norms, and whole gradients. One thread at a
/// time for each group; collectives, but where the group is null: one rank.
class GradientGather {
 public:
  using Pages = std::span<const std::unique_ptr<optim::TrainedPage>>;

  GradientGather(optim::Gradients& gradients, pager::Pager& pager)
      : gradients_(gradients), pager_(pager) {}

  /// Bytes that ranks gather at a time, the same on all of them: `staging`, or less where one has
  /// less.
  void set_piece(Bytes bytes) noexcept { piece_ = bytes; }
  Bytes most_piece() const noexcept { return gradients_.scratch().size(); }
  /// Memory of that size for whoever else is in a collective call.
  std::span<std::byte> scratch() const noexcept { return gradients_.scratch().first(piece_); }

  /// Takes the sums of squares of pages that have a gradient and no sums. No collective.
  void measure(Pages pages);
  /// The norm of all gradients, from the sums of squares that every rank keeps of its shards. The
  /// bits do not depend on how many ranks there are.
  double norm(Pages pages, comm::Group* group) const;
  /// Every rank gets the whole reduced gradient of these pages, of which it has its own shard. What
  /// is not in memory passes through the gradients' scratch buffer.
  void gather(std::span<optim::TrainedPage* const> pages, comm::Group& group);
  /// The same for one page, as fp32 to where the caller wants it, and without keeping it. `to` is
  /// empty where nobody looks.
  void read(const optim::TrainedPage& page, std::span<float> to, comm::Group* group);

 private:
  optim::Gradients& gradients_;
  pager::Pager& pager_;
  Bytes piece_ = 0;
};

}  // namespace pagoda::engine

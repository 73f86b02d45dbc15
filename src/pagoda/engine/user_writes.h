// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "pagoda/comm/group.h"
#include "pagoda/engine/frozen_parameters.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// Ranks have written different things to a parameter. All throw it, nothing has changed, and the
/// engine can go on.
class WritesDiffer : public StepRefused {
 public:
  using StepRefused::StepRefused;
};

/// The pages that user code of this rank has written to since the last step(). Its next one makes
/// what was written every rank's: each gives its own shard. Until then others have not seen it, so
/// nothing may leave the engine of which they know nothing. A plain value.
class UserWrites {
 public:
  /// `pages`: of the attached models, in an order that is the same on all ranks.
  UserWrites(pager::Pager& pager, std::span<pager::Page* const> pages);

  /// A number that tells sets of pages apart.
  std::uint64_t hash() const noexcept;
  /// Whether there is one.
  bool any() const noexcept;
  /// Where any rank has some: WritesDiffer on all ranks, with the parameter and the ranks, if one
  /// that was written is not the same on all ranks any more. (What was put back counts as not
  /// written.) Reads the written pages once, on this rank, and no others; StepRefused on all ranks
  /// where one cannot. `call`: what is refused, as the message has it. A collective of the group.
  void require_same(comm::Group& group, std::string_view call) const;

 private:
  pager::Pager& pager_;
  std::span<pager::Page* const> pages_;
  std::vector<std::uint64_t> bits_;
};

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/comm/group.h"

namespace pagoda::engine {

/// The calls in which all ranks must be together, and backward, in which they need not be.
enum class Call : std::uint8_t {
  Backward,
  Attach,
  Step,
  Join,
  ZeroGrad,
  Grad,
  GradNorm,
  Barrier,
  Release,
  Close,
};

/// What one rank tells the others when they meet: the call that it is in ("Every collective call
/// says what it is" in docs/notes/communication.md). A plain value.
struct Collective {
  Call call = Call::Backward;
  /// Instead of the call's name, as the user wrote it: "save_pretrained".
  std::string label;
  /// What the call is given, where that must be the same on all ranks: "'h.0.weight'".
  std::string detail;
  /// Steps taken so far.
  std::uint64_t steps = 0;
  /// Of the optimizers' constants.
  std::uint64_t rules = 0;
  /// Of the parameters that user code has written to since the last step.
  std::uint64_t writes = 0;
  /// A number that goes with the call: it tells apart what `detail` shows.
  std::uint64_t value = 0;
  /// Parameters have been thawed on this rank, and not all ranks know it yet (thaw.md).
  bool thawed = false;
  /// This rank cannot do it now; the others are told why, and do not do it either.
  bool refused = false;

  /// "in step() 5", "in save_pretrained() after step() 4".
  std::string where() const;
};

/// Tells the others `mine` and returns everyone's, by rank. A collective of the group.
std::vector<Collective> exchange(comm::Group& group, const Collective& mine);

/// Where all ranks are in a call: the one that they make together, which is that of the ranks that
/// have not joined. Diverged, with both sides, if there is none.
const Collective& call_of_all(std::span<const Collective> ranks);

/// "rank 0 is in step() 5, ranks 1, 2 in join() after step() 4": of at most five places.
std::string where_ranks_are(std::span<const Collective> ranks);

}  // namespace pagoda::engine

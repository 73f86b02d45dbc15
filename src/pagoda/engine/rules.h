// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "pagoda/comm/group.h"
#include "pagoda/engine/collective.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/trained_page.h"

namespace pagoda::engine {

/// The optimizers of the parameter groups: what their constants are now, and what they were when
/// states were made for them. The thread that trains changes them; hash() is anybody's.
class Rules {
 public:
  /// At attach().
  void assign(std::vector<Optimizer> groups);
  const std::vector<Optimizer>& now() const noexcept { return now_; }
  /// What the page's state was made for.
  const Optimizer& at_attach(const optim::TrainedPage& page) const {
    return at_attach_[page.parameters[0].group];
  }

  /// `group` exists, and `to` is the same rule with other constants, which are valid.
  void set(std::size_t group, const Optimizer& to);
  /// What ranks compare in every call.
  std::uint64_t hash() const noexcept { return hash_.load(std::memory_order_relaxed); }

  /// Ranks that step have the same constants, or all throw Diverged. Those that have joined do not
  /// follow the others' schedules: they take what the first rank that steps has. A collective.
  void agree(std::span<const Collective> ranks, comm::Group& group);

 private:
  void changed();

  std::vector<Optimizer> now_;
  std::vector<Optimizer> at_attach_;
  std::atomic<std::uint64_t> hash_{0};
};

}  // namespace pagoda::engine

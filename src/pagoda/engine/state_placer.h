// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "pagoda/comm/group.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/engine/fit.h"
#include "pagoda/engine/host_buffers.h"
#include "pagoda/engine/rules.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// Where a model's parameters, gradients and optimizer states go, as the configuration says: plans
/// them all, then takes their homes from the budgets. The thread that trains uses it.
class StatePlacer {
 public:
  using Pages = std::vector<pager::Page*>;

  /// `ranks`: how many there are.
  StatePlacer(const Config& config, pager::Pager& pager, optim::Updater& updater,
              const Rules& rules, int ranks)
      : config_(config),
        tiers_(pager.tiers()),
        pager_(pager),
        updater_(updater),
        rules_(rules),
        buffers_(config, tiers_.device()->kind(), ranks),
        alone_(ranks == 1) {}

  /// A model as it is to be placed. `buffers`: host memory that its gradients take on their way.
  /// Law 2: a plan that cannot fit fails before step 1 and says what would make it fit.
  Fit plan(const Pages& pages, std::span<const std::unique_ptr<optim::TrainedPage>> trained,
           Bytes buffers) const;
  /// The same for pages of that model which are trained from now on.
  Fit plan_thawed(const Pages& pages, std::span<optim::TrainedPage* const> thawed,
                  Bytes buffers) const;

  /// Parameters go where the plan has them.
  void place(const Pages& pages, const Fit& fit);
  /// A page's gradient and state.
  void take_homes(optim::TrainedPage& page);
  /// …of all these, whose plan fits.
  void take_homes_of_thawed(const Pages& pages, std::span<optim::TrainedPage* const> thawed,
                            const Fit& fit);
  static void drop_homes(optim::TrainedPage& page) noexcept;
  /// Logs what was to lie in host memory and lies on NVMe, for want of room.
  void log_overflow(const Pages& pages, std::span<optim::TrainedPage* const> trained) const;

  /// What early updates of these pages take beside gradients and states, as far as the host has
  /// room beside all that must be there. Where it has none, or states lie elsewhere, updates wait
  /// for step(). A collective; `group` is null where there is one rank.
  void make_room_for_early_updates(const Pages& pages, std::span<optim::TrainedPage* const> trained,
                                   comm::Group* group);

 private:
  void plan_states(const optim::TrainedPage& page, Fit& fit) const;
  std::vector<Bytes> gradients_in_wait(const Pages& pages) const;
  void expect_states(const Fit& fit) const;

  const Config& config_;
  pager::Tiers& tiers_;
  pager::Pager& pager_;
  optim::Updater& updater_;
  const Rules& rules_;
  const HostBuffers buffers_;
  const bool alone_;
};

}  // namespace pagoda::engine

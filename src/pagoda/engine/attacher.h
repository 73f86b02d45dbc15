// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "pagoda/base/budget.h"
#include "pagoda/engine/agreement.h"
#include "pagoda/engine/attached_model.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/engine/fit.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/model_spec.h"
#include "pagoda/engine/ranks.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/engine/rules.h"
#include "pagoda/engine/shard_exchange.h"
#include "pagoda/engine/state_placer.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// Makes a model the attached one: does it fit, is it equal on all ranks, who has which values. The
/// thread that trains calls it, on all ranks alike.
class Attacher {
 public:
  /// What it puts to work. `shards` is null where there is one rank.
  struct Parts {
    const Config& config;
    Rules& rules;
    Ranks& ranks;
    pager::Pager& pager;
    optim::Updater& updater;
    StatePlacer& placer;
    ShardExchange* shards;
    EarlyUpdates& early;
    Reducer& reducer;
    GradientGather& gather;
    AttachedModel& model;
  };

  /// `left_free`: host memory that a model's states leave to activations.
  Attacher(const Parts& parts, Reservation left_free)
      : parts_(parts), left_free_(std::move(left_free)) {}

  /// All ranks have met in attach(). Returns the pages whose values are others now. What a
  /// UserError, or memory that ran out, ends leaves no model, and fails nothing; everything else
  /// fails the engine. `watch`, if any, comes last.
  std::vector<pager::Page*> attach(const std::function<ModelSpec()>& describe,
                                   const std::function<void()>& watch);
  /// No model is attached any more. Pages of which ranks have shards stay, also if their storage
  /// dies: others may read them.
  void detach();

 private:
  Fit prepare(ModelSpec& model);
  std::unique_ptr<optim::TrainedPage> make_trained(TrainedSpec spec, std::size_t number) const;
  Settings settings(const ModelSpec& model) const;
  std::vector<pager::Page*> start_with_values_of_rank_0(const ModelSpec& model, const Fit& fit);
  bool alone() const noexcept { return parts_.ranks.alone(); }

  const Parts parts_;
  Reservation left_free_;  // activation_reserve, until states are placed
};

}  // namespace pagoda::engine

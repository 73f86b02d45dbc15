// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "pagoda/engine/attached_model.h"
#include "pagoda/engine/frozen_parameters.h"
#include "pagoda/engine/ranks.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/engine/state_placer.h"
#include "pagoda/optim/gradients.h"
#include "pagoda/optim/updater.h"

namespace pagoda::engine {

/// What becomes of pages when their parameters are thawed: they get gradient and state when all
/// ranks have room, and lose them again when the ranks do not agree (docs/notes/thaw.md).
///
/// take_homes() and drop_homes() are called by the gradients' thread, or by step() while that one
/// is idle; agree() by the thread that trains, in step().
class Thawing {
 public:
  Thawing(Ranks& ranks, AttachedModel& model, FrozenParameters& frozen, StatePlacer& placer,
          Reducer& reducer, optim::Gradients& gradients, optim::Updater& updater)
      : ranks_(ranks),
        model_(model),
        frozen_(frozen),
        placer_(placer),
        reducer_(reducer),
        gradients_(gradients),
        updater_(updater) {}

  /// Takes gradients and states of all these pages from the budgets, and room for their gradients
  /// in flight, or throws.
  void take_homes(std::span<optim::TrainedPage* const> pages);
  void drop_homes(std::span<optim::TrainedPage* const> pages);

  /// What was thawed since the last step is trained from this one on, if all ranks have thawed it
  /// and have room; ThawRefused on all ranks if not. All gradients are added up. `joined`: this
  /// rank is in join(), and has no opinion. A collective.
  void agree(bool joined);

 private:
  void withdraw(std::span<const std::size_t> differing);

  Ranks& ranks_;
  AttachedModel& model_;
  FrozenParameters& frozen_;
  StatePlacer& placer_;
  Reducer& reducer_;
  optim::Gradients& gradients_;
  optim::Updater& updater_;
};

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "pagoda/engine/attached_model.h"
#include "pagoda/engine/collective.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/ranks.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/engine/rules.h"
#include "pagoda/engine/step_trace.h"
#include "pagoda/engine/thawing.h"
#include "pagoda/optim/loss_scale.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// What step() did.
struct StepResult {
  std::uint64_t step = 0;      // of those that were not skipped, from 1
  bool skipped = false;        // gradients were not finite: nothing changed but the loss scale
  std::optional<double> norm;  // of all gradients before clipping, where it was needed
  double loss_scale = 1;       // of the next step
};

/// Takes steps: which pages have a pending update from now on, with which factor, and in which
/// order ("What step() does" in docs/notes/lazy-updates.md). The thread that trains calls it, on
/// all ranks alike.
class Stepper {
 public:
  /// What it puts to work.
  struct Parts {
    const Config& config;
    Rules& rules;
    Ranks& ranks;
    pager::Pager& pager;
    optim::Updater& updater;
    EarlyUpdates& early;
    Reducer& reducer;
    GradientGather& gather;
    Thawing& thawing;
    AttachedModel& model;
  };
  /// Called for every page that has a pending update from now on.
  using Bumped = std::function<void(pager::Page&)>;

  explicit Stepper(const Parts& parts);

  /// All ranks have met, as `met` says. `joined`: this one in join(). StepRefused: on all ranks,
  /// and nothing has changed; everything else that it throws fails the engine.
  StepResult step(std::span<const Collective> met, bool joined, const Bumped& bumped);
  /// Of the gradients accumulated so far. A collective.
  double norm();

  /// A model is attached, or a step was taken: the forward of the next step begins.
  void trace_next() noexcept { trace_.stepped(steps_); }
  std::uint64_t steps() const noexcept { return steps_; }
  double loss_scale() const noexcept { return scale_.scale(); }
  std::uint64_t skipped() const noexcept { return scale_.skipped(); }

 private:
  StepResult take(std::span<const Collective> met, bool joined, const Bumped& bumped);
  void publish_user_writes();
  void start_updates(std::span<optim::TrainedPage* const> pages, double factor, bool clipped,
                     const Bumped& bumped);
  void agree_on_order();
  std::vector<optim::TrainedPage*> update_order(std::span<optim::TrainedPage* const> pages);
  void warn_of_skipped_steps() const;
  bool alone() const noexcept { return parts_.ranks.alone(); }

  const Parts parts_;
  optim::LossScale scale_;
  StepTrace trace_;
  std::atomic<std::uint64_t> steps_ = 0;  // any thread may look
};

}  // namespace pagoda::engine

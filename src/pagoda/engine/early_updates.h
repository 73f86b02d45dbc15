// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// Updates that begin during the last backward pass before a step.
///
/// Where nothing global is needed, a page whose gradient is complete can be updated at once, if
/// nobody looks at it any more before step(); where the global norm is, on trust that it will not
/// clip, and step() undoes it if it does. Whether somebody looks is learnt from the steps
/// before; a page or a habit of the user's that would see the difference is left to step() from
/// then on, and one that shows only after an update has begun is an error ("During backward" in
/// docs/notes/lazy-updates.md). All ranks decide alike: each asks here, and one no is enough.
class EarlyUpdates {
 public:
  /// Called when a page's update is about to begin, on the gradients' thread.
  using Beginning = std::function<void(optim::TrainedPage&)>;

  /// Whether, and how, updates begin early.
  enum class Mode : std::uint8_t { Never, Always, OnTrust };

  EarlyUpdates(pager::Pager& pager, optim::Updater& updater, Mode mode, Beginning beginning);

  /// Before the first pass.
  void set_mode(Mode mode);
  /// A backward pass begins; `last`: of its step. With these rules the updates are made.
  void backward_begins(bool last, const std::vector<Optimizer>& rules);
  /// A gradient of the pass is about to be handed over.
  void gradient_comes(optim::TrainedPage& page);
  /// The pass is over: `all` trained pages have had their turn.
  void backward_ends(std::span<const std::unique_ptr<optim::TrainedPage>> all);
  /// The user does `what` after the last backward has begun and before the step, which changes what
  /// the step does. UserError if an update has begun; otherwise none begins before step() from now
  /// on. Waits for what the ranks are being asked.
  void forbid(std::string_view what);
  /// The engine has failed: nobody waits for an answer any more.
  void fail() noexcept;
  /// Somebody waits for the gradients of all ranks: where this one had no last pass, updates are
  /// made with these rules.
  void no_more_backward(const std::vector<Optimizer>& rules);
  /// step() takes over, with all gradients there. `clipped`: it does not take them as they are, so
  /// the next is not trusted to.
  void step_begins(std::span<const std::unique_ptr<optim::TrainedPage>> all, bool clipped);

  /// May the page be updated now? If yes, nobody may touch it until answer(). `gave`: this rank has
  /// a gradient of it in the pass, which is its last. The gradients' thread.
  bool ask(optim::TrainedPage& page, bool gave);
  /// What all ranks said.
  void answer(optim::TrainedPage& page, bool yes);

 private:
  /// The pass under way, or the one that was.
  enum class Pass : std::uint8_t { None, Open, LastOpen, LastOver };

  pager::Pager& pager_;
  optim::Updater& updater_;
  const Beginning beginning_;

  std::mutex mutex_;
  std::condition_variable answered_;
  Mode mode_;                                          // guarded by mutex_
  bool trusted_ = false;                               // guarded by mutex_: the last did not clip
  Pass pass_ = Pass::None;                             // guarded by mutex_
  std::uint64_t step_ = 1;                             // guarded by mutex_: the one to come
  std::uint64_t asked_ = 0;                            // guarded by mutex_: no answer yet
  std::uint64_t begun_ = 0;                            // guarded by mutex_: in this step
  bool failed_ = false;                                // guarded by mutex_
  std::shared_ptr<const optim::StepScalars> scalars_;  // guarded by mutex_
};

}  // namespace pagoda::engine

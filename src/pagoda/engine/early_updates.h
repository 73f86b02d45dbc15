// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// What would change the step came while its updates are made. It had no effect.
class RefusedInWindow : public UserError {
 public:
  using UserError::UserError;
};

/// Decides which updates begin during the last backward pass before a step, and what may happen
/// between its beginning and step(): the *window*.
///
/// A page whose gradient is complete is updated at once, into memory that nobody reads; step()
/// makes it visible ("Early updates" in docs/notes/lazy-updates.md). So parameters can be read in
/// the window as ever. What would change the step is refused there, whether an update has begun or
/// not; updates that can be rolled back are, instead. A script that does such a thing in its first
/// step has a habit, and no update begins early from then on. Any thread.
class EarlyUpdates {
 public:
  /// Called when a page's update is about to begin, on the gradients' thread.
  using Beginning = std::function<void(optim::TrainedPage&)>;

  /// Whether, and how, updates begin early.
  enum class Mode : std::uint8_t {
    Never,
    Final,       ///< they use up the gradient, and step() takes them
    Reversible,  ///< step() may roll them back: on trust that it does not clip
  };

  EarlyUpdates(pager::Pager& pager, optim::Updater& updater, Mode mode, Beginning beginning);

  /// Before the first pass.
  void set_mode(Mode mode);
  /// What the ranks agree on in step(): no update begins early on one of them if another has given
  /// it up.
  bool given_up() const;
  void give_up();

  /// A backward pass begins; `last`: of its step. Updates are made with these rules. UserError in
  /// the window.
  void backward_begins(bool last, const std::vector<Optimizer>& rules);
  /// A gradient of the pass is about to be handed over. UserError if it must not come any more.
  void gradient_comes(const optim::TrainedPage& page);
  void backward_ends();
  /// `over`: no gradient of the pass can come any more. If none has, the window of a single rank is
  /// as it was before the pass.
  void backward_fails(bool over);
  /// The user does `what`, which changes what the step does, or looks at what an early update uses
  /// up. In the window a UserError, or, where updates can be rolled back, that. It must not have
  /// had an effect yet.
  void require_no_window(std::string_view what);
  bool in_window() const;
  /// The user writes to a trained parameter: the same, but for what its own pass does to it before
  /// its gradient comes.
  void require_may_write(const optim::TrainedPage& page);
  /// The user holds the page: returns when an update of it that has begun has been computed.
  void wait_for_update(const optim::TrainedPage& page);
  /// What becomes of a write to a trained parameter that is found only later: the user holds it.
  pager::RawWrites raw_writes();
  /// The user reads gradients, which early updates that cannot be rolled back have used up.
  void require_gradients(std::string_view what);
  /// step() waits for the gradients of all ranks: a rank without a last pass has the same updates
  /// as the others, with these rules.
  void step_waits(const std::vector<Optimizer>& rules);
  /// It has thrown before it changed anything: the user can do something else now. What has begun
  /// stays so, and other parameters can be written to; where nothing has, the window is open to
  /// everything.
  void step_refused();
  /// The model has gone, with its updates and habits.
  void forget();
  /// step() has taken, or rolled back, what has begun. `clipped`: it did not take gradients as they
  /// are, so the next is not trusted to.
  void step_ends(bool clipped);

  /// A gradient is about to be added to the page's: an update that had begun is rolled back. The
  /// gradients' thread.
  void before_add(const optim::TrainedPage& page);
  /// May the page be updated at the end of this round? `gave`: this rank has a gradient of it in
  /// the pass, which is its last. The gradients' thread, as answer().
  bool ask(const optim::TrainedPage& page, bool gave);
  /// What all ranks said.
  void answer(optim::TrainedPage& page, bool yes);

 private:
  /// The pass under way, or the one that was. From LastEmpty on: the window.
  enum class Pass : std::uint8_t {
    None,        ///< none has begun in this step
    Open,        ///< not the last of the step, under way or over
    LastEmpty,   ///< the last: no gradient of it has come. If it fails: Open, on a single rank
    LastOpen,    ///< one has come, and updates may have begun
    LastFailed,  ///< step() completes with what has come
    LastOver,
  };
  /// What is known of a page from the steps before.
  struct Habit {
    std::uint64_t first_gradient = 0;  // the step of its first gradient in a last pass
    std::uint64_t pass = 0;            // of its last gradient
    bool comes_twice = false;          // …in one pass
  };
  using Lock = RankedLock<LockRank::EarlyUpdates>;

  bool in_window(const Lock& lock) const noexcept;
  bool in_last_pass(const Lock& lock) const noexcept;
  bool refuses(const Lock& lock) const noexcept;
  std::string_view when(const Lock& lock) const noexcept;
  void leave_to_step(std::string_view what, Lock& lock);
  void roll_back(std::span<optim::TrainedPage* const> pages);
  void end_window(Lock& lock);
  Habit& habit(const optim::TrainedPage& page, const Lock& lock);

  pager::Pager& pager_;
  optim::Updater& updater_;
  const Beginning beginning_;

  mutable RankedMutex<LockRank::EarlyUpdates> mutex_;
  Mode mode_;                               // guarded by mutex_
  bool trusted_ = false;                    // guarded by mutex_: the last did not clip
  bool held_back_ = false;                  // guarded by mutex_: in this step none begins
  bool in_step_ = false;                    // guarded by mutex_
  bool refused_ = false;                    // guarded by mutex_: step() was, and is called again
  Pass pass_ = Pass::None;                  // guarded by mutex_
  std::uint64_t passes_ = 0;                // guarded by mutex_
  std::uint64_t step_ = 1;                  // guarded by mutex_: the one to come
  std::vector<optim::TrainedPage*> begun_;  // guarded by mutex_: in this step
  std::vector<Habit> habits_;               // guarded by mutex_, by page number
  std::shared_ptr<const optim::StepScalars> scalars_;  // guarded by mutex_
};

}  // namespace pagoda::engine

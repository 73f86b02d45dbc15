// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/early_updates.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"

namespace pagoda::engine {
namespace {

constexpr std::string_view kAnotherBackward = "another backward()";

}  // namespace

using optim::TrainedPage;

EarlyUpdates::EarlyUpdates(pager::Pager& pager, optim::Updater& updater, Mode mode,
                           Beginning beginning)
    : pager_(pager), updater_(updater), beginning_(std::move(beginning)), mode_(mode) {}

void EarlyUpdates::set_mode(Mode mode) {
  const Lock lock(mutex_);
  mode_ = mode;
  habits_.clear();
}

bool EarlyUpdates::given_up() const {
  const Lock lock(mutex_);
  return mode_ == Mode::Never;
}

void EarlyUpdates::give_up() {
  const Lock lock(mutex_);
  mode_ = Mode::Never;
}

/// From the beginning of a step's last pass until step().
bool EarlyUpdates::in_window(const Lock& /*lock*/) const noexcept {
  return mode_ != Mode::Never && pass_ >= Pass::LastEmpty;
}

bool EarlyUpdates::in_last_pass(const Lock& /*lock*/) const noexcept {
  return pass_ == Pass::LastEmpty || pass_ == Pass::LastOpen;
}

/// In the first step nothing begins: it shows what the script does in the window.
bool EarlyUpdates::refuses(const Lock& lock) const noexcept {
  return in_window(lock) && step_ > 1 && mode_ == Mode::Final && !held_back_;
}

/// Where in the window something came.
std::string_view EarlyUpdates::when(const Lock& /*lock*/) const noexcept {
  return pass_ == Pass::LastOver ? "between the last backward() of a step and step()"
                                 : "during, or after a failure of, the last backward() of a step";
}

EarlyUpdates::Habit& EarlyUpdates::habit(const TrainedPage& page, const Lock& /*lock*/) {
  if (habits_.size() <= page.number) habits_.resize(page.number + 1);
  return habits_[page.number];
}

void EarlyUpdates::leave_to_step(std::string_view what, Lock& lock) {
  mode_ = Mode::Never;
  lock.unlock();
  log::info("engine", "updates begin in step() from now on: something came between backward and it",
            {{"what", std::string(what)}});
}

void EarlyUpdates::require_no_window(std::string_view what) {
  Lock lock(mutex_);
  if (!in_window(lock)) return;
  if (refuses(lock)) {
    constexpr std::string_view kAccumulation =
        "set accumulation to the number of backward() calls in a step, or set early_updates=False";
    if (pass_ != Pass::LastOver) {
      throw RefusedInWindow(fmt::format(
          "{} came {}, and the step's updates may have started. After a failure call step(), "
          "which completes the step with the gradients that came, or set early_updates=False",
          what, when(lock)));
    }
    if (what == kAnotherBackward) {
      throw RefusedInWindow(fmt::format(
          "backward() was called again before step(), and the step's updates may have started. "
          "Call step() first, {}",
          kAccumulation));
    }
    throw RefusedInWindow(fmt::format(
        "{} came {}, and the step's updates may have started. Do it before that backward() or "
        "after step(), {}",
        what, when(lock), kAccumulation));
  }
  if (step_ == 1) return leave_to_step(what, lock);
  held_back_ = true;
  const std::vector<TrainedPage*> pages = std::exchange(begun_, {});
  lock.unlock();  // the gradients' thread begins no other one
  roll_back(pages);
}

bool EarlyUpdates::in_window() const {
  const Lock lock(mutex_);
  return in_window(lock);
}

void EarlyUpdates::require_may_write(const TrainedPage& page) {
  {
    // A checkpoint's recomputation may write, as an embedding with max_norm does. No update begins
    // before the gradient has come, and none at all of a page that was written to.
    const Lock lock(mutex_);
    if (in_last_pass(lock) && habit(page, lock).pass != passes_) return;
    // What step() was refused for can be mended: no update begins of a page that was written to.
    if (refused_ && std::find(begun_.begin(), begun_.end(), &page) == begun_.end()) return;
  }
  require_no_window(fmt::format("an in-place write to parameter '{}'", page.page->name()));
}

void EarlyUpdates::wait_for_update(const TrainedPage& page) {
  {
    const Lock lock(mutex_);
    if (std::find(begun_.begin(), begun_.end(), &page) == begun_.end()) return;
  }
  updater_.wait_for_early(page);
}

pager::RawWrites EarlyUpdates::raw_writes() {
  const Lock lock(mutex_);
  if (!in_window(lock)) return pager::RawWrites::Count;
  if (!refuses(lock)) return pager::RawWrites::Report;
  // What is written under the pin is undone, which is told in the window only: so that stays.
  if (pass_ == Pass::LastEmpty) pass_ = Pass::LastOpen;
  return pager::RawWrites::Refuse;
}

void EarlyUpdates::roll_back(std::span<TrainedPage* const> pages) {
  updater_.roll_back(pages);
  for (const TrainedPage* page : pages) pager_.end_supersede(*page->page);
}

void EarlyUpdates::require_gradients(std::string_view what) {
  Lock lock(mutex_);
  if (mode_ == Mode::Reversible || held_back_ || !in_window(lock)) return;
  if (refuses(lock)) {
    throw UserError(fmt::format(
        "{} was called {}: its updates use up the gradients, and may have started. Call it in the "
        "first step as well, or set early_updates=False{}",
        what, when(lock),
        what == "grad_norm()"
            ? "; or read step().norm, which attach(…, clip=inf) computes at every step"
            : ""));
  }
  leave_to_step(what, lock);
}

void EarlyUpdates::backward_begins(bool last, const std::vector<Optimizer>& rules) {
  require_no_window(kAnotherBackward);
  const Lock lock(mutex_);
  pass_ = last ? Pass::LastEmpty : Pass::Open;
  ++passes_;
  if (last && mode_ != Mode::Never) {
    scalars_ = std::make_shared<const optim::StepScalars>(optim::StepScalars{1, rules});
  }
}

void EarlyUpdates::gradient_comes(const TrainedPage& page) {
  {
    const Lock lock(mutex_);
    if (pass_ == Pass::LastEmpty) pass_ = Pass::LastOpen;
    if (mode_ == Mode::Never) return;
    if (pass_ == Pass::LastOpen) {
      Habit& known = habit(page, lock);
      if (known.first_gradient == 0) known.first_gradient = step_;
      const bool twice = known.pass == passes_;
      known.pass = passes_;
      if (!twice || known.comes_twice) return;
      known.comes_twice = true;
      if (!refuses(lock)) return;
      throw UserError(fmt::format(
          "parameter '{}' got another gradient in one backward(), which it did not in the steps "
          "before, and its update may have started; set early_updates=False for a model whose "
          "passes differ like this",
          page.page->name()));
    }
  }
  require_no_window("another backward pass");
}

void EarlyUpdates::backward_ends() {
  const Lock lock(mutex_);
  if (in_last_pass(lock)) pass_ = Pass::LastOver;
}

void EarlyUpdates::backward_fails(bool over) {
  const Lock lock(mutex_);
  // Other ranks' windows may stay, and what they refuse this one must.
  const bool alone = pager_.sharding().ranks == 1;
  if (pass_ == Pass::LastEmpty && over && alone) {
    pass_ = Pass::Open;
  } else if (in_last_pass(lock)) {
    pass_ = Pass::LastFailed;
  }
}

void EarlyUpdates::step_waits(const std::vector<Optimizer>& rules) {
  const Lock lock(mutex_);
  in_step_ = true;
  if (mode_ == Mode::Never || pass_ == Pass::LastOver) return;
  scalars_ = std::make_shared<const optim::StepScalars>(optim::StepScalars{1, rules});
}

void EarlyUpdates::step_refused() {
  const Lock lock(mutex_);
  in_step_ = false;
  refused_ = true;
  if (begun_.empty()) held_back_ = true;
}

void EarlyUpdates::step_ends(bool clipped) {
  Lock lock(mutex_);
  trusted_ = !clipped;
  ++step_;
  end_window(lock);
}

void EarlyUpdates::forget() {
  Lock lock(mutex_);
  trusted_ = false;
  step_ = 1;
  habits_.clear();
  end_window(lock);
}

/// Gives the lock back: what was fetched ahead may have to be waited for.
void EarlyUpdates::end_window(Lock& lock) {
  held_back_ = in_step_ = refused_ = false;
  pass_ = Pass::None;
  const std::vector<TrainedPage*> begun = std::exchange(begun_, {});
  lock.unlock();
  for (const TrainedPage* page : begun) pager_.end_supersede(*page->page);
}

void EarlyUpdates::before_add(const TrainedPage& page) {
  TrainedPage* begun = nullptr;
  {
    const Lock lock(mutex_);
    const auto found = std::find(begun_.begin(), begun_.end(), &page);
    if (found == begun_.end()) return;
    begun = *found;
    begun_.erase(found);
  }
  roll_back({&begun, 1});
}

bool EarlyUpdates::ask(const TrainedPage& page, bool gave) {
  const Lock lock(mutex_);
  if (mode_ == Mode::Never || step_ == 1 || held_back_) return false;
  if (mode_ == Mode::Reversible && !trusted_) return false;
  if (!gave && !in_step_) return false;  // its user may still do anything
  const Habit& known = habit(page, lock);
  // A page that has not been through a step yet may be one whose gradient comes twice.
  if (known.comes_twice) return false;
  if (gave && (known.first_gradient == 0 || known.first_gradient == step_)) return false;
  return updater_.may_start_early(page, mode_ == Mode::Reversible);
}

void EarlyUpdates::answer(TrainedPage& page, bool yes) {
  if (!yes) return;
  beginning_(page);
  const Lock lock(mutex_);
  if (held_back_ || mode_ == Mode::Never || !pager_.supersede(*page.page)) return;
  PAGODA_TRACE("engine", "update early", {"page", page.page->name()});
  for (optim::TrainedParameter& parameter : page.parameters) parameter.used = parameter.filled;
  updater_.start_early(page, scalars_, mode_ == Mode::Reversible);
  begun_.push_back(&page);
}

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/early_updates.h"

#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"

namespace pagoda::engine {

using optim::TrainedPage;

EarlyUpdates::EarlyUpdates(pager::Pager& pager, optim::Updater& updater, Mode mode,
                           Beginning beginning)
    : pager_(pager), updater_(updater), beginning_(std::move(beginning)), mode_(mode) {}

void EarlyUpdates::set_mode(Mode mode) {
  const std::lock_guard lock(mutex_);
  mode_ = mode;
}

void EarlyUpdates::backward_begins(bool last, const std::vector<Optimizer>& rules) {
  forbid("another backward()");
  const std::lock_guard lock(mutex_);
  pass_ = last ? Pass::LastOpen : Pass::Open;
  if (last && mode_ != Mode::Never) {
    scalars_ = std::make_shared<const optim::StepScalars>(optim::StepScalars{1, rules});
  }
}

void EarlyUpdates::gradient_comes(TrainedPage& page) {
  {
    const std::lock_guard lock(mutex_);
    if (mode_ == Mode::Never) return;
    if (pass_ == Pass::LastOpen) {
      if (page.first_gradient == 0) page.first_gradient = step_;
      pager_.gradient_gone(*page.page);
      return;
    }
  }
  forbid("another backward pass");
}

void EarlyUpdates::backward_ends(std::span<const std::unique_ptr<TrainedPage>> all) {
  const std::lock_guard lock(mutex_);
  if (pass_ != Pass::LastOpen) return;
  pass_ = Pass::LastOver;
  if (mode_ == Mode::Never) return;
  for (const auto& page : all) pager_.gradient_gone(*page->page);
}

void EarlyUpdates::forbid(std::string_view what) {
  std::unique_lock lock(mutex_);
  if (mode_ == Mode::Never) return;
  const bool last = pass_ == Pass::LastOpen || pass_ == Pass::LastOver;
  if (!last && begun_ == 0) return;  // a rank without a last pass has begun what others' brought
  answered_.wait(lock, [&] { return asked_ == 0 || failed_; });
  if (begun_ > 0) {
    throw UserError(fmt::format(
        "{} came {} the last backward() of a step and before step(): its updates have begun. "
        "Set accumulation to the number of backward() calls in a step and do what changes the step "
        "before the last of them, or set early_updates to false",
        what, pass_ == Pass::LastOpen ? "in, or after a failure of," : "after"));
  }
  mode_ = Mode::Never;
  log::info("engine", "updates begin in step() from now on: something came between backward and it",
            {{"what", std::string(what)}});
}

void EarlyUpdates::fail() noexcept {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  answered_.notify_all();
}

void EarlyUpdates::no_more_backward(const std::vector<Optimizer>& rules) {
  const std::lock_guard lock(mutex_);
  if (mode_ == Mode::Never || pass_ == Pass::LastOver) return;
  scalars_ = std::make_shared<const optim::StepScalars>(optim::StepScalars{1, rules});
}

void EarlyUpdates::step_begins(std::span<const std::unique_ptr<TrainedPage>> all, bool clipped) {
  const std::lock_guard lock(mutex_);
  trusted_ = !clipped;
  pass_ = Pass::None;
  begun_ = 0;
  ++step_;
  for (const auto& page : all) {
    page->begun = false;
    pager_.step_begins(*page->page);
  }
}

bool EarlyUpdates::ask(TrainedPage& page, bool gave) {
  const std::lock_guard lock(mutex_);
  if (mode_ == Mode::Never || step_ == 1) return false;
  if (mode_ == Mode::OnTrust && !(trusted_ && page.can_be_undone)) return false;
  // A page that has not been through a step yet may be one that is looked at after its gradient.
  if (gave && (page.first_gradient == 0 || page.first_gradient == step_)) return false;
  if (!pager_.ask_early(*page.page)) return false;
  if (mode_ == Mode::OnTrust && page.state_blank) {  // there is nothing to go back to
    pager_.answer_early(*page.page, false);
    return false;
  }
  ++asked_;
  return true;
}

void EarlyUpdates::answer(TrainedPage& page, bool yes) {
  std::shared_ptr<const optim::StepScalars> scalars;
  bool on_trust = false;
  {
    const std::lock_guard lock(mutex_);
    scalars = scalars_;
    on_trust = mode_ == Mode::OnTrust;
    --asked_;
    if (yes) ++begun_;
    answered_.notify_all();
  }
  pager_.answer_early(*page.page, yes);
  if (!yes) return;
  PAGODA_TRACE("engine", "update early", {"page", page.page->name});
  page.begun = true;
  for (optim::TrainedParameter& parameter : page.parameters) parameter.used = parameter.filled;
  beginning_(page);
  pager::Page* const owing = page.page;
  pager_.owe({&owing, 1});
  TrainedPage* const begins = &page;
  updater_.start({&begins, 1}, std::move(scalars), on_trust);
}

}  // namespace pagoda::engine

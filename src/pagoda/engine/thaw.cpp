// SPDX-License-Identifier: Apache-2.0
// What Runtime does about parameters that are frozen at attach() and thawed later:
// docs/notes/thaw.md.
#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/engine/runtime.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using optim::TrainedParameter;

bool all_frozen(const TrainedPage& page) {
  return std::all_of(page.parameters.begin(), page.parameters.end(),
                     [](const TrainedParameter& parameter) { return parameter.frozen; });
}

}  // namespace

/// Shares the pages out: those with a parameter to train now, and those without.
void Runtime::keep_frozen(const std::vector<FrozenSpec>& frozen,
                          std::vector<std::unique_ptr<TrainedPage>> pages) {
  std::vector<FrozenParameters::Parameter> parameters;
  for (const FrozenSpec& spec : frozen) {
    FrozenParameters::Parameter& parameter = parameters.emplace_back();
    parameter.in_page = spec.in_page;
    parameter.name = spec.name;
    parameter.obstacle = spec.obstacle;
    if (!spec.obstacle.empty()) continue;
    parameter.page = pages.at(spec.page).get();
  }
  std::vector<std::unique_ptr<TrainedPage>> without;
  for (auto& page : pages) {
    (all_frozen(*page) ? without : trained_).push_back(std::move(page));
  }
  frozen_->reset(std::move(parameters), std::move(without));
}

/// Takes gradients and states of all these pages from the budgets, and room for their gradients on
/// their way, or throws.
void Runtime::take_homes_of_thawed(std::span<TrainedPage* const> pages) {
  const Fit fit = placer_->plan_thawed(pages_, pages, reducer_->host_bytes_with(pages));
  fit.check();
  reducer_->make_room_for(pages);
  placer_->take_homes_of_thawed(pages_, pages, fit);
}

void Runtime::drop_homes_of_thawed(std::span<TrainedPage* const> pages) {
  for (TrainedPage* page : pages) StatePlacer::drop_homes(*page);
  reducer_->make_room_for({});
}

/// Pages that have got gradient and state in the rounds so far are like any other.
void Runtime::take_joined() {
  auto joined = frozen_->take_joined();
  if (joined.empty()) return;
  for (auto& page : joined) trained_.push_back(std::move(page));
  std::sort(trained_.begin(), trained_.end(),
            [](const auto& a, const auto& b) { return a->number < b->number; });
}

/// What was thawed since the last step is trained from this one on, if all ranks have thawed it and
/// have room; ThawRefused on all ranks if not. All gradients are added up.
void Runtime::agree_on_thawed(bool joined) {
  if (!reducer_->thaw_news()) return;
  const FrozenParameters::Opinions opinions = frozen_->compare(ranks_.control(), joined);
  if (!opinions.differing.empty()) {
    withdraw_thawed(opinions.differing);
    throw ThawRefused(opinions.error);
  }
  // What has had no backward since: memory is taken now.
  const auto without_gradient = frozen_->admit(joined ? FrozenSet{} : frozen_->thawed(),
                                               FrozenParameters::Asking::Step, ranks_.control());
  if (!without_gradient.empty()) {
    take_joined();
    reducer_->set_order(first_order());
  }
  if (const std::string refusal = frozen_->take_refusal(); !refusal.empty()) {
    throw ThawRefused(refusal);
  }
  const std::vector<std::size_t> thawed = frozen_->finish_step();
  if (thawed.empty()) return;
  std::vector<TrainedPage*> pages;
  Bytes bytes = 0;
  for (const std::size_t i : thawed) {
    TrainedPage* page = (*frozen_)[i].page;
    if (std::find(pages.begin(), pages.end(), page) != pages.end()) continue;
    pages.push_back(page);
    bytes += page->gradient.size() + page->state.size();
  }
  log::info("engine", "thawed parameters are trained from now on",
            {{"parameters", thawed.size()},
             {"names", frozen_->names(thawed)},
             {"gradients_and_states", format_bytes(bytes)}});
  placer_->make_room_for_early_updates(pages_, pages, early_mode(), ranks_.control());
}

void Runtime::require_none_refused() const {
  if (!frozen_->refusal().empty()) throw ThawRefused(frozen_->refusal());
}

/// These were thawed on some ranks only: nobody trains them.
void Runtime::withdraw_thawed(std::span<const std::size_t> differing) {
  std::vector<std::pair<TrainedPage*, std::uint32_t>> joined;
  for (const std::size_t i : differing) {
    const FrozenParameters::Parameter& parameter = (*frozen_)[i];
    if (parameter.state != FrozenParameters::State::Joining) continue;
    joined.emplace_back(parameter.page, parameter.in_page);
  }
  frozen_->withdraw(differing);
  for (const auto& [page, in_page] : joined) gradients_->forget(*page, in_page);
  for (auto& page : trained_) {
    if (!all_frozen(*page)) continue;
    updater_->remove(*page);
    optim::Gradients::clear(*page);
    StatePlacer::drop_homes(*page);
    frozen_->put_back(std::move(page));
  }
  std::erase(trained_, nullptr);
  reducer_->set_order(first_order());
}

}  // namespace pagoda::engine

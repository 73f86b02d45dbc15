// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/thawing.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"

namespace pagoda::engine {

using optim::TrainedPage;

void Thawing::take_homes(std::span<TrainedPage* const> pages) {
  const Fit fit = placer_.plan_thawed(model_.pages(), pages, reducer_.host_bytes_with(pages));
  fit.check();
  reducer_.make_room_for(pages);
  placer_.take_homes_of_thawed(model_.pages(), pages, fit);
}

void Thawing::drop_homes(std::span<TrainedPage* const> pages) {
  for (TrainedPage* page : pages) StatePlacer::drop_homes(*page);
  reducer_.make_room_for({});
}

void Thawing::agree(bool joined) {
  if (!reducer_.thaw_news()) return;
  const FrozenParameters::Opinions opinions = frozen_.compare(ranks_.control(), joined);
  if (!opinions.differing.empty()) {
    withdraw(opinions.differing);
    throw ThawRefused(opinions.error);
  }
  // What has had no backward since: memory is taken now.
  const auto without_gradient = frozen_.admit(joined ? FrozenSet{} : frozen_.thawed(),
                                              FrozenParameters::Asking::Step, ranks_.control());
  if (!without_gradient.empty()) {
    model_.take_joined();
    reducer_.set_order(model_.last_first());
  }
  if (const std::string refusal = frozen_.take_refusal(); !refusal.empty()) {
    throw ThawRefused(refusal);
  }
  const std::vector<std::size_t> thawed = frozen_.finish_step();
  if (thawed.empty()) return;
  std::vector<TrainedPage*> pages;
  Bytes bytes = 0;
  for (const std::size_t i : thawed) {
    TrainedPage* page = frozen_[i].page;
    if (std::find(pages.begin(), pages.end(), page) != pages.end()) continue;
    pages.push_back(page);
    bytes += page->gradient.size() + page->state.size();
  }
  log::info("engine", "thawed parameters are trained from now on",
            {{"parameters", thawed.size()},
             {"names", frozen_.names(thawed)},
             {"gradients_and_states", format_bytes(bytes)}});
  placer_.make_room_for_early_updates(model_.pages(), pages, ranks_.control());
}

/// These were thawed on some ranks only: nobody trains them.
void Thawing::withdraw(std::span<const std::size_t> differing) {
  std::vector<std::pair<TrainedPage*, std::uint32_t>> joined;
  for (const std::size_t i : differing) {
    const FrozenParameters::Parameter& parameter = frozen_[i];
    if (parameter.state != FrozenParameters::State::Joining) continue;
    joined.emplace_back(parameter.page, parameter.in_page);
  }
  frozen_.withdraw(differing);
  for (const auto& [page, in_page] : joined) gradients_.forget(*page, in_page);
  for (auto& page : model_.take_frozen()) {
    updater_.remove(*page);
    optim::Gradients::clear(*page);
    StatePlacer::drop_homes(*page);
    frozen_.put_back(std::move(page));
  }
  reducer_.set_order(model_.last_first());
}

}  // namespace pagoda::engine

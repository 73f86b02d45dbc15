// SPDX-License-Identifier: Apache-2.0
// What Runtime does about parameters that are frozen at attach() and thawed later:
// docs/notes/thaw.md.
#include <algorithm>
#include <array>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/engine/backend.h"
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
    parameter.page->parameters.at(spec.in_page).frozen = true;
  }
  std::vector<std::unique_ptr<TrainedPage>> without;
  for (auto& page : pages) {
    (all_frozen(*page) ? without : trained_).push_back(std::move(page));
  }
  frozen_->reset(std::move(parameters), std::move(without));
}

/// Ranks that do not train the same parameters would wait for each other's gradients.
void Runtime::check_same_frozen() {
  std::vector<std::pair<std::size_t, const TrainedPage*>> trained;  // place in the model, page
  std::vector<std::pair<std::size_t, const TrainedPage*>> frozen;
  std::uint64_t size = 0;
  const auto look = [&](const TrainedPage& page) {
    for (const TrainedParameter& parameter : page.parameters) {
      (parameter.frozen ? frozen : trained).emplace_back(parameter.index, &page);
      size = std::max<std::uint64_t>(size, parameter.index + 1);
    }
  };
  for (const auto& page : trained_) look(*page);
  for (std::size_t i = 0; i < frozen_->size(); ++i) {
    const TrainedPage* page = (*frozen_)[i].page;
    const bool seen = std::any_of(frozen.begin(), frozen.end(),
                                  [&](const auto& other) { return other.second == page; });
    if (page != nullptr && !seen) look(*page);
  }
  // The model's size, and what its FrozenSets have: the largest number and the smallest.
  std::array<std::uint64_t, 3> sizes = {size, frozen_->size(), ~std::uint64_t{frozen_->size()}};
  control_->all_reduce_max(sizes);
  size = sizes[0];
  std::array<FrozenSet, 3> sets = {FrozenSet(size), FrozenSet(size), FrozenSet(size)};
  for (const auto& [index, page] : trained) sets[0].insert(index);
  for (const auto& [index, page] : frozen) sets[1].insert(index);
  for (std::size_t i = 0; i < size; ++i) {
    if (!sets[0].contains(i) && !sets[1].contains(i)) sets[2].insert(i);
  }
  for (FrozenSet& set : sets) control_->all_reduce_or(set.words());
  for (std::size_t i = 0; i < size; ++i) {
    const int kinds = (sets[0].contains(i) ? 1 : 0) + (sets[1].contains(i) ? 1 : 0) +
                      (sets[2].contains(i) ? 1 : 0);
    if (kinds < 2) continue;
    std::string name = fmt::format("number {} of the model", i);
    for (const auto* list : {&trained, &frozen}) {
      for (const auto& [index, page] : *list) {
        if (index == i) name = fmt::format("'{}'", page->page->name);
      }
    }
    throw UserError(fmt::format(
        "parameter {} is trained on some ranks, and frozen or in no group on others: set "
        "requires_grad and the groups alike on all ranks before attach()",
        name));
  }
  PAGODA_REQUIRE_EQ(sizes[1], ~sizes[2],
                    "ranks have different numbers of frozen parameters: set requires_grad alike on "
                    "all ranks before attach()");
}

/// Where gradients or states lie on the device, pages that can come again leave it first: there is
/// room then, and it is taken in one piece.
void Runtime::make_device_room() {
  constexpr auto kDevice = pager::Placement::Device;
  if (pager_placement(config_.gradients) != kDevice &&
      pager_placement(config_.optimizer) != kDevice) {
    return;
  }
  for (pager::Page* page : pages_) pager_->evict(*page);
}

/// Takes gradients and states of all these pages from the budgets, or throws.
void Runtime::take_homes_of_thawed(std::span<TrainedPage* const> pages) {
  Bytes gradients = 0;
  Bytes states = 0;
  for (const TrainedPage* page : pages) {
    check_gradient_staging(*page);
    gradients += page->gradient_bytes();
    const Optimizer& rule = rules_[page->parameters[0].group];
    states += updater_->layout(*page, rule).bytes(page->updated.size());
  }
  const auto on_host = [](pager::Placement placement) {
    return placement != pager::Placement::Device && placement != pager::Placement::Nvme;
  };
  pager::HostMemory& host = tiers_->host();
  if (on_host(pager_placement(config_.gradients))) host.expect(pager::tag::kGradients, gradients);
  if (on_host(pager_placement(config_.optimizer))) host.expect(pager::tag::kOptimizer, states);
  make_device_room();
  for (TrainedPage* page : pages) take_homes(*page);
  // A gradient that comes before its turn must still find room.
  if (tiers_->swap() == nullptr) {
    (void)tiers_->budget(pager::Tier::Host).reserve(bytes_in_wait(), pager::tag::kGradients);
  }
}

/// Pages that have got gradient and state in the rounds so far are like any other.
void Runtime::take_joined() {
  auto joined = frozen_->take_joined();
  if (joined.empty()) return;
  for (auto& page : joined) trained_.push_back(std::move(page));
  std::sort(trained_.begin(), trained_.end(),
            [](const auto& a, const auto& b) { return a->number < b->number; });
}

/// Gradients come last parameter first, until more is known.
void Runtime::reset_order() {
  std::vector<TrainedPage*> order;
  for (auto page = trained_.rbegin(); page != trained_.rend(); ++page) order.push_back(page->get());
  reducer_->set_order(std::move(order));
}

/// What was thawed since the last step is trained from this one on, if all ranks have thawed it and
/// have room; ThawRefused on all ranks if not. All gradients are added up.
void Runtime::agree_on_thawed(bool leaving) {
  if (!reducer_->thaw_news()) return;
  const FrozenParameters::Opinions opinions = frozen_->compare(control_.get(), leaving);
  if (!opinions.differing.empty()) {
    withdraw_thawed(opinions.differing);
    throw ThawRefused(opinions.error);
  }
  // What has had no backward since: memory is taken now.
  const auto without_gradient = frozen_->admit(
      leaving ? FrozenSet{} : frozen_->thawed(), FrozenParameters::Asking::Step, control_.get(),
      [this](std::span<TrainedPage* const> pages) { reducer_->make_room_for(pages); });
  if (!without_gradient.empty()) {
    take_joined();
    reset_order();
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
  std::erase_if(pages, [](const TrainedPage* page) { return page->can_be_undone; });
  if (early_mode() == EarlyUpdates::Mode::OnTrust) make_room_to_undo(pages);
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
    page->gradient = {};
    page->state = {};
    frozen_->put_back(std::move(page));
  }
  std::erase(trained_, nullptr);
  reset_order();
}

}  // namespace pagoda::engine

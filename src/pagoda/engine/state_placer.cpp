// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/state_placer.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/out_of_memory.h"
#include "pagoda/engine/backend.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using pager::Range;
using pager::Tier;

bool on_device(const StateNeed& state) {
  return state.placement == pager::Placement::Device;
}

}  // namespace

/// What one page's gradient and state need.
void StatePlacer::plan_states(const TrainedPage& page, Fit& fit) const {
  fit.gradients.pages.push_back(page.gradient_bytes());
  fit.optimizer.pages.push_back(
      updater_.layout(page, rules_.at_attach(page)).bytes(page.updated.size()));
}

Fit StatePlacer::plan(const Pages& pages, std::span<const std::unique_ptr<TrainedPage>> trained,
                      Bytes buffers) const {
  Fit fit(tiers_, buffers_);
  fit.need_buffers(buffers);
  fit.parameters.placement = pager_placement(config_.parameters);
  fit.gradients.placement = pager_placement(config_.gradients);
  fit.optimizer.placement = pager_placement(config_.optimizer_state);
  for (const Page* page : pages) {
    const Range range = config_.zero == 3 ? pager_.shard_of(*page) : Range{0, page->elements};
    fit.parameters.pages.push_back(range.size() * page->element_size);
    fit.hold(pager::Pager::home(*page));
    fit.need_page(page->name(), page->bytes());
  }
  for (const auto& page : trained) {
    for (const optim::TrainedParameter& parameter : page->parameters) {
      PAGODA_REQUIRE_EQ(rules_.now()[parameter.group].index(), rules_.at_attach(*page).index(),
                        "parameters that share the storage '{}' need one kind of optimizer",
                        page->page->name());
    }
    plan_states(*page, fit);
  }
  fit.waiting.pages = gradients_in_wait(pages);
  // Where there is room for all of them, operators need not wait for any.
  fit.whole_parameters = config_.zero != 3 || alone_;
  if (fit.whole_parameters && fit.parameters.placement == pager::Placement::Auto &&
      fit.parameters_fit_on_device()) {
    fit.parameters.placement = pager::Placement::Device;
  }
  expect_states(fit);
  return fit;
}

Fit StatePlacer::plan_thawed(const Pages& pages, std::span<TrainedPage* const> thawed,
                             Bytes buffers) const {
  Fit fit(tiers_, buffers_);
  fit.whose = "gradients and optimizer";
  fit.need_buffers(buffers);
  fit.gradients.placement = pager_placement(config_.gradients);
  fit.optimizer.placement = pager_placement(config_.optimizer_state);
  for (const TrainedPage* page : thawed) plan_states(*page, fit);
  fit.waiting.pages = gradients_in_wait(pages);
  return fit;
}

/// A gradient that comes before its turn waits on the host (Reducer::park): there is room for two.
std::vector<Bytes> StatePlacer::gradients_in_wait(const Pages& pages) const {
  if (alone_) return {};
  Bytes largest = 0;
  for (const Page* page : pages) largest = std::max(largest, page->bytes());
  return {largest, largest};
}

/// Host memory for gradients and states is made in pieces that they fill.
void StatePlacer::expect_states(const Fit& fit) const {
  for (const auto& [need, tag] : {std::pair{&fit.gradients, pager::tag::kGradients},
                                  std::pair{&fit.optimizer, pager::tag::kOptimizer}}) {
    if (need->placement == pager::Placement::Nvme || on_device(*need)) continue;
    Bytes blocks = 0;
    for (const Bytes page : need->pages) blocks += pager::Tiers::nvme_bytes(page);
    tiers_.host().expect(tag, blocks);
  }
}

void StatePlacer::place(const Pages& pages, const Fit& fit) {
  // What is placed on the device takes room that pages have which are only there by chance.
  if (on_device(fit.parameters) || on_device(fit.gradients) || on_device(fit.optimizer)) {
    for (Page* page : pages) pager_.evict(*page);
  }
  if (config_.zero == 3 && !alone_) {
    for (Page* page : pages) {
      pager_.set_home_range(*page, pager_.shard_of(*page), fit.parameters.placement);
    }
    return;
  }
  if (!on_device(fit.parameters)) return;
  for (Page* page : pages) pager_.fix(*page);
}

void StatePlacer::take_homes(TrainedPage& page) {
  const optim::StateLayout layout = updater_.layout(page, rules_.at_attach(page));
  page.gradient = tiers_.allocate(page.gradient_bytes(), pager_placement(config_.gradients),
                                  pager::tag::kGradients, page.page->name());
  page.state =
      tiers_.allocate(layout.bytes(page.updated.size()), pager_placement(config_.optimizer_state),
                      pager::tag::kOptimizer, page.page->name());
}

void StatePlacer::take_homes_of_thawed(const Pages& pages, std::span<TrainedPage* const> thawed,
                                       const Fit& fit) {
  expect_states(fit);
  if (on_device(fit.gradients) || on_device(fit.optimizer)) {
    for (Page* page : pages) pager_.evict(*page);
  }
  for (TrainedPage* page : thawed) take_homes(*page);
}

void StatePlacer::drop_homes(TrainedPage& page) noexcept {
  page.gradient = {};
  page.state = {};
}

void StatePlacer::log_overflow(const Pages& pages, std::span<TrainedPage* const> trained) const {
  const auto on_nvme = [](Placement wanted, const pager::Home& home) {
    return wanted == Placement::Host && home && home.tier() == Tier::Nvme ? home.size() : 0;
  };
  Bytes parameters = 0;
  Bytes gradients = 0;
  Bytes states = 0;
  for (const Page* page : pages) {
    parameters += on_nvme(config_.parameters, pager::Pager::home(*page));
  }
  for (const TrainedPage* page : trained) {
    gradients += on_nvme(config_.gradients, page->gradient);
    states += on_nvme(config_.optimizer_state, page->state);
  }
  if (parameters + gradients + states == 0) return;
  log::info("engine", "host_budget is full: spilled to nvme",
            {{"parameters", format_bytes(parameters)},
             {"gradients", format_bytes(gradients)},
             {"optimizer", format_bytes(states)}});
}

void StatePlacer::make_room_for_early_updates(const Pages& pages,
                                              std::span<TrainedPage* const> trained,
                                              comm::Group* group) {
  const EarlyUpdates::Mode mode = early_mode(config_);
  if (mode == EarlyUpdates::Mode::Never) return;
  const bool reversible = mode == EarlyUpdates::Mode::Reversible;
  Bytes expected = 0;
  for (const TrainedPage* page : trained) {
    if (const auto bytes = updater_.early_bytes(*page, reversible)) {
      expected += bytes->spare + bytes->next;
    }
  }
  if (expected > 0) tiers_.host().expect(pager::tag::kEarly, expected);
  const std::vector<Bytes> waiting = gradients_in_wait(pages);
  const auto in_wait = tiers_.budget(Tier::Host)
                           .try_reserve(std::accumulate(waiting.begin(), waiting.end(), Bytes{0}),
                                        pager::tag::kGradients);
  std::vector<std::uint64_t> cannot(trained.size());
  // The gradients that come first gain most.
  for (std::size_t i = trained.size(); i-- > 0;) {
    TrainedPage& page = *trained[i];
    const auto on_host = [&](Bytes bytes) -> std::optional<pager::Home> {
      try {
        return tiers_.try_allocate_on_host(bytes, pager::tag::kEarly, page.page->name());
      } catch (const OutOfMemory&) {
        return std::nullopt;
      }
    };
    const auto bytes = updater_.early_bytes(page, reversible);
    if (bytes && bytes->spare + bytes->next == 0) continue;
    auto spare = bytes && in_wait ? on_host(bytes->spare) : std::nullopt;
    auto next = spare ? on_host(bytes->next) : std::nullopt;
    if (!next) {
      cannot[i] = 1;
      continue;
    }
    if (reversible) page.spare = std::move(*spare);
    page.next = std::move(*next);
  }
  if (group != nullptr) group->all_reduce_max(cannot);  // one rank's no is enough
  for (std::size_t i = 0; i < trained.size(); ++i) {
    if (cannot[i] == 0) continue;
    trained[i]->spare = {};
    trained[i]->next = {};
  }
  const auto without = std::accumulate(cannot.begin(), cannot.end(), std::uint64_t{0});
  if (without == 0 || !reversible) return;
  log::warn("engine",
            "clip_ahead: some updates wait for step(): their states are not in host memory, or it "
            "has no room for what rolls them back",
            {{"pages", without}, {"of", trained.size()}});
}

}  // namespace pagoda::engine

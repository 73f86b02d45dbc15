// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/stepper.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/engine/user_writes.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;

optim::LossScale::Options loss_scale_options(const Config& config) {
  optim::LossScale::Options options;
  if (!config.scales_loss()) return options;
  options.dynamic = config.loss_scale.kind == LossScale::Kind::Dynamic;
  options.initial = options.dynamic ? config.loss_scale_initial : config.loss_scale.value;
  options.smallest = config.loss_scale_minimum;
  options.window = config.loss_scale_window;
  return options;
}

}  // namespace

Stepper::Stepper(const Parts& parts)
    : parts_(parts),
      scale_(loss_scale_options(parts.config)),
      trace_(parts.config.trace, parts.config.trace_steps, parts.ranks.rank(), parts.ranks.size()) {
}

StepResult Stepper::step(std::span<const Collective> met, bool joined, const Bumped& bumped) {
  PAGODA_TRACE("engine", "step");
  try {
    return take(met, joined, bumped);
  } catch (const StepRefused&) {  // on all ranks, and nothing has changed
    parts_.early.step_refused();
    throw;
  } catch (...) {
    parts_.ranks.failure().fail_and_throw();
  }
}

StepResult Stepper::take(std::span<const Collective> met, bool joined, const Bumped& bumped) {
  const Config& config = parts_.config;
  if (!alone()) parts_.rules.agree(met, *parts_.ranks.control());
  if (const auto& checker = parts_.pager.tiers().device()->checker()) checker->check();
  parts_.thawing.agree(joined);

  std::vector<TrainedPage*> pages;
  for (const auto& page : parts_.model.trained()) {
    if (!page->filled()) continue;
    pages.push_back(page.get());
    // The update before is over, on all ranks from the exchange below on: nobody reads what it left
    // any more.
    parts_.pager.wait_for_version(*page->page);
  }
  publish_user_writes();

  StepResult result;
  double factor = 1 / scale_.scale();
  bool clipped = false;
  bool finite = true;
  if (config.takes_norm()) {
    const double norm =
        parts_.gather.norm(parts_.model.trained(), parts_.ranks.control()) / scale_.scale();
    finite = std::isfinite(norm);
    result.norm = norm;
    if (config.clips() && finite) {
      const double clipping = config.clip / (norm + 1e-6);
      clipped = clipping < 1;
      if (clipped) factor *= clipping;
    }
  }
  result.skipped = config.scales_loss() && !finite;
  if (config.scales_loss() && !pages.empty()) scale_.step(finite);
  if (result.skipped) warn_of_skipped_steps();
  result.loss_scale = scale_.scale();
  if (!alone()) agree_on_order();
  if (result.skipped) {
    for (TrainedPage* page : pages) optim::Gradients::clear(*page);
    parts_.early.step_ends(clipped);
  } else {
    start_updates(pages, factor, clipped, bumped);
  }
  result.step = steps_;
  return result;
}

/// What user code has written goes to the homes: updates start from those.
void Stepper::publish_user_writes() {
  pager::Pager& pager = parts_.pager;
  const std::vector<Page*>& pages = parts_.model.pages();
  comm::Group* const group = parts_.ranks.control();
  pager.find_raw_writes();
  bool wrote_shards = pager.written().shared;
  if (!alone()) {
    const UserWrites writes(pager, pages);
    std::array<std::uint64_t, 3> flags = {wrote_shards ? 1U : 0U, parts_.early.given_up() ? 1U : 0U,
                                          writes.any() ? 1U : 0U};
    group->all_reduce_max(flags);
    wrote_shards = flags[0] != 0;
    if (flags[1] != 0) parts_.early.give_up();
    if (flags[2] != 0) writes.require_same(*group, "step()");
  }
  pager.forget_user_writes(pages);
  for (Page* page : pager.written().pages) pager.publish(*page);
  // Nobody may read a shard before everyone has published it.
  if (wrote_shards && !alone()) group->barrier();
}

void Stepper::start_updates(std::span<TrainedPage* const> pages, double factor, bool clipped,
                            const Bumped& bumped) {
  if (parts_.config.zero == 0 && !alone()) {
    std::vector<TrainedPage*> apart;
    std::copy_if(pages.begin(), pages.end(), std::back_inserter(apart),
                 [](const TrainedPage* page) { return !page->gathered; });
    parts_.gather.gather(apart, *parts_.ranks.control());
  }
  std::vector<TrainedPage*> starting(pages.begin(), pages.end());
  const auto early =
      std::stable_partition(starting.begin(), starting.end(),
                            [&](TrainedPage* page) { return !parts_.updater.early(*page); });
  std::vector<TrainedPage*> begun(early, starting.end());
  if (clipped) {  // with the wrong factor
    parts_.updater.roll_back(begun);
    begun.clear();
  } else {
    starting.erase(early, starting.end());
  }
  if (!pages.empty()) ++steps_;
  parts_.ranks.status().stepped(steps_);
  std::vector<Page*> pending;
  pending.reserve(pages.size());
  for (const TrainedPage* page : pages) pending.push_back(page->page);
  for (TrainedPage* page : starting) {
    for (optim::TrainedParameter& parameter : page->parameters) parameter.used = parameter.filled;
  }
  const std::vector<Page*> exposed = parts_.pager.mark_pending(pending);
  parts_.updater.release(begun);
  parts_.updater.start(starting, std::make_shared<const optim::StepScalars>(
                                     optim::StepScalars{factor, parts_.rules.now()}));
  parts_.early.step_ends(clipped);
  for (TrainedPage* page : pages) {
    optim::Gradients::clear(*page);
    bumped(*page->page);
  }
  parts_.updater.follow(update_order(pages));
  parts_.pager.refresh(exposed);
}

double Stepper::norm() {
  try {
    const auto pages = parts_.model.trained();
    parts_.gather.measure(pages);
    const double norm = parts_.gather.norm(pages, parts_.ranks.control()) / scale_.scale();
    // Where no step needs them, nobody keeps the sums up to date with the next micro-batch.
    if (!parts_.config.takes_norm()) {
      for (const auto& page : pages) page->squares.clear();
    }
    return norm;
  } catch (...) {
    parts_.ranks.failure().fail_and_throw();
  }
}

/// Gradients are exchanged in the order in which they last came on the first rank.
void Stepper::agree_on_order() {
  std::unordered_map<std::uint32_t, TrainedPage*> by_number;
  for (const auto& page : parts_.model.trained()) by_number[page->number] = page.get();
  std::vector<std::uint32_t> order;
  std::unordered_set<std::uint32_t> seen;
  const auto put = [&](std::uint32_t number) {
    if (by_number.contains(number) && seen.insert(number).second) order.push_back(number);
  };
  for (const std::uint32_t number : parts_.reducer.arrival_order()) put(number);
  for (const auto& page : parts_.model.trained()) put(page->number);
  parts_.ranks.control()->broadcast(std::as_writable_bytes(std::span(order)), 0);
  std::vector<TrainedPage*> pages;
  pages.reserve(order.size());
  for (const std::uint32_t number : order) pages.push_back(by_number.at(number));
  parts_.reducer.set_order(std::move(pages));
}

/// The order in which the next forward will need them, as far as it is known.
std::vector<TrainedPage*> Stepper::update_order(std::span<TrainedPage* const> pages) {
  std::vector<Page*> used;
  used.reserve(pages.size());
  for (const TrainedPage* page : pages) used.push_back(page->page);
  const std::vector<std::size_t> uses = parts_.pager.next_uses(used);
  std::vector<std::size_t> order(pages.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return uses[a] < uses[b]; });
  std::vector<TrainedPage*> out;
  out.reserve(pages.size());
  for (const std::size_t place : order) out.push_back(pages[place]);
  return out;
}

/// A training in which every step is skipped looks like one that does not learn: told at 10, 100,
/// 1000, … in a row.
void Stepper::warn_of_skipped_steps() const {
  std::uint64_t row = scale_.skipped_in_a_row();
  while (row >= 100 && row % 10 == 0) row /= 10;
  if (row != 10 || parts_.ranks.rank() != 0) return;
  const char* advice = "set loss_scale to a smaller number, or to \"dynamic\"";
  if (scale_.can_fall()) {
    advice = "it falls with each of them; a smaller loss_scale_initial needs fewer";
  } else if (parts_.config.loss_scale.kind == LossScale::Kind::Dynamic) {
    advice = "it is at loss_scale_minimum: look for infinities and NaN in the loss itself";
  }
  log::warn("engine", "steps are skipped, for gradients are not finite",
            {{"in_a_row", scale_.skipped_in_a_row()},
             {"loss_scale", scale_.scale()},
             {"advice", advice}});
}

}  // namespace pagoda::engine

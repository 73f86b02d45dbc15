// SPDX-License-Identifier: Apache-2.0
// Runtime::step(): which pages owe an update, with which factor, and in which order they are made.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/runtime.h"
#include "pagoda/engine/user_writes.h"

namespace pagoda::engine {

using optim::TrainedPage;
using pager::Page;

/// A training in which every step is skipped looks like one that does not learn: told at 10, 100,
/// 1000, … in a row.
void Runtime::warn_of_skipped_steps() const {
  std::uint64_t row = scale_.skipped_in_a_row();
  while (row >= 100 && row % 10 == 0) row /= 10;
  if (row != 10 || rank() != 0) return;
  const char* advice = "set loss_scale to a smaller number, or to \"dynamic\"";
  if (scale_.can_fall()) {
    advice = "it falls with each of them; a smaller loss_scale_initial needs fewer";
  } else if (config_.loss_scale.kind == LossScale::Kind::Dynamic) {
    advice = "it is at loss_scale_minimum: look for infinities and NaN in the loss itself";
  }
  log::warn("engine", "steps are skipped, for gradients are not finite",
            {{"in_a_row", scale_.skipped_in_a_row()},
             {"loss_scale", scale_.scale()},
             {"advice", advice}});
}

StepResult Runtime::step(const std::function<void(Page&)>& bumped) {
  check();
  check_raw_writes();
  const Whereabouts::Inside inside(ranks_.whereabouts(), where_in(Call::Step));
  meet(in_call(Call::Step));
  const StepResult result = step_together(false, bumped);
  trace_.stepped(steps_);
  return result;
}

void Runtime::join(const std::function<void(Page&)>& bumped) {
  const Whereabouts::Inside inside(ranks_.whereabouts(), where_in(Call::Join));
  for (;;) {
    const Collective all = meet(in_call(Call::Join));
    switch (all.call) {
      case Call::ZeroGrad:
        clear_gradients();
        break;
      case Call::GradNorm:
        if (frozen_->refusal().empty()) (void)norm_together();
        break;
      case Call::Grad: {
        const auto page = std::find_if(trained_.begin(), trained_.end(),
                                       [&](const auto& one) { return one->number == all.value; });
        if (page == trained_.end()) break;  // frozen: the others say so
        gather_gradient(**page, {});
        break;
      }
      default:  // step(), or all have joined: what came since the last step is used
        try {
          step_together(true, bumped);
        } catch (const StepRefused& refused) {  // the others' to act upon: they come back to it
          log::warn("engine", "a step of the others was refused", {{"cause", refused.message()}});
          break;
        }
        trace_.stepped(steps_);
        if (all.call == Call::Join) return;
    }
  }
}

/// `joined`: this rank has, and has no opinion of its own.
StepResult Runtime::step_together(bool joined, const std::function<void(Page&)>& bumped) {
  PAGODA_TRACE("engine", "step");
  try {
    if (!alone()) rules_.agree(ranks_met_, *ranks_.control());
    check_order();
    agree_on_thawed(joined);

    std::vector<TrainedPage*> pages;
    for (const auto& page : trained_) {
      if (!page->filled()) continue;
      pages.push_back(page.get());
      // The update before is over, on all ranks from the exchange below on: nobody reads what it
      // left any more.
      pager_->await_version(*page->page);
    }
    pager_->find_raw_writes();
    bool wrote_shards = pager_->written().shared;
    if (!alone()) {
      const UserWrites writes(*pager_, pages_);
      std::array<std::uint64_t, 3> flags = {wrote_shards ? 1U : 0U, early_->given_up() ? 1U : 0U,
                                            writes.any() ? 1U : 0U};
      ranks_.control()->all_reduce_max(flags);
      wrote_shards = flags[0] != 0;
      if (flags[1] != 0) early_->give_up();
      if (flags[2] != 0) writes.require_same(*ranks_.control(), "step()");
    }
    pager_->forget_user_writes(pages_);
    // What user code has written goes to the homes: updates start from those.
    for (Page* page : pager_->written().pages) pager_->publish(*page);
    // Nobody may read a shard before everyone has published it.
    if (wrote_shards && !alone()) ranks_.control()->barrier();

    StepResult result;
    double factor = 1 / scale_.scale();
    bool clipped = false;
    bool finite = true;
    if (config_.clip > 0 || scales_loss()) {
      const double norm =
          gradient_norm(trained_, pager_->sharding(), ranks_.control()) / scale_.scale();
      finite = std::isfinite(norm);
      result.norm = norm;
      if (config_.clip > 0 && finite) {
        const double clipping = config_.clip / (norm + 1e-6);
        clipped = clipping < 1;
        if (clipped) factor *= clipping;
      }
    }
    const bool skips = scales_loss() && !finite;
    if (scales_loss() && !pages.empty()) scale_.step(finite);
    if (skips) warn_of_skipped_steps();
    result.loss_scale = scale_.scale();
    result.skipped = skips;
    if (!alone()) agree_on_order();
    if (skips) {
      for (TrainedPage* page : pages) optim::Gradients::clear(*page);
      early_->step_ends(clipped);
      result.step = steps_;
      return result;
    }
    if (config_.zero == 0 && !alone()) {
      std::vector<TrainedPage*> apart;
      std::copy_if(pages.begin(), pages.end(), std::back_inserter(apart),
                   [](const TrainedPage* page) { return !page->gathered; });
      gather_gradients(apart, *tiers_, pager_->sharding(), gather_buffer(), *ranks_.control());
    }
    std::vector<TrainedPage*> starting = pages;
    const auto early =
        std::stable_partition(starting.begin(), starting.end(),
                              [&](TrainedPage* page) { return !updater_->early(*page); });
    std::vector<TrainedPage*> begun(early, starting.end());
    if (clipped) {  // with the wrong factor
      updater_->roll_back(begun);
      begun.clear();
    } else {
      starting.erase(early, starting.end());
    }
    if (!pages.empty()) ++steps_;
    result.step = steps_;
    ranks_.whereabouts().stepped(steps_);
    std::vector<Page*> pending;
    pending.reserve(pages.size());
    for (const TrainedPage* page : pages) pending.push_back(page->page);
    for (TrainedPage* page : starting) {
      for (optim::TrainedParameter& parameter : page->parameters) parameter.used = parameter.filled;
    }
    const std::vector<Page*> exposed = pager_->owe(pending);
    updater_->release(begun);
    updater_->start(starting, std::make_shared<const optim::StepScalars>(
                                  optim::StepScalars{factor, rules_.now()}));
    early_->step_ends(clipped);
    for (TrainedPage* page : pages) {
      optim::Gradients::clear(*page);
      bumped(*page->page);
    }
    updater_->follow(update_order(pages));
    pager_->refresh(exposed);
    return result;
  } catch (const StepRefused&) {  // on all ranks, and nothing has changed
    early_->step_refused();
    throw;
  } catch (...) {
    fail_and_throw();
  }
}

/// Gradients are exchanged in the order in which they last came on the first rank.
void Runtime::agree_on_order() {
  std::unordered_map<std::uint32_t, TrainedPage*> by_number;
  for (const auto& page : trained_) by_number[page->number] = page.get();
  std::vector<std::uint32_t> order;
  std::unordered_set<std::uint32_t> seen;
  const auto put = [&](std::uint32_t number) {
    if (by_number.contains(number) && seen.insert(number).second) order.push_back(number);
  };
  for (const std::uint32_t number : reducer_->arrival_order()) put(number);
  for (const auto& page : trained_) put(page->number);
  ranks_.control()->broadcast(std::as_writable_bytes(std::span(order)), 0);
  std::vector<TrainedPage*> pages;
  pages.reserve(order.size());
  for (const std::uint32_t number : order) pages.push_back(by_number.at(number));
  reducer_->set_order(std::move(pages));
}

/// The order in which the next forward will need them, as far as it is known.
std::vector<TrainedPage*> Runtime::update_order(const std::vector<TrainedPage*>& pages) {
  std::vector<Page*> used;
  used.reserve(pages.size());
  for (const TrainedPage* page : pages) used.push_back(page->page);
  const std::vector<std::size_t> uses = pager_->next_uses(used);
  std::vector<std::size_t> order(pages.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return uses[a] < uses[b]; });
  std::vector<TrainedPage*> out;
  out.reserve(pages.size());
  for (const std::size_t place : order) out.push_back(pages[place]);
  return out;
}

}  // namespace pagoda::engine

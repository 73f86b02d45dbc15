// SPDX-License-Identifier: Apache-2.0
// Runtime::step(): which pages owe an update, with which factor, and in which order they are made.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/runtime.h"

namespace pagoda::engine {

using optim::TrainedPage;
using pager::Page;

StepResult Runtime::step(const std::function<void(Page&)>& bumped) {
  const Whereabouts::Inside inside(whereabouts_, in_call(Call::Step).where());
  meet(in_call(Call::Step));
  const StepResult result = step_together(bumped);
  trace_.stepped(steps_);
  return result;
}

void Runtime::join(const std::function<void(Page&)>& bumped) {
  const Whereabouts::Inside inside(whereabouts_, in_call(Call::Join).where());
  for (;;) {
    const Collective all = meet(in_call(Call::Join));
    switch (all.call) {
      case Call::ZeroGrad:
        clear_gradients();
        break;
      case Call::GradNorm:
        (void)norm_together();
        break;
      case Call::Grad: {
        const TrainedPage& page = *trained_.at(all.value);
        std::vector<float> nobody_looks(page.elements());
        gather_gradient(page, nobody_looks);
        break;
      }
      default:  // step(), or all have joined: what came since the last step is used
        step_together(bumped);
        trace_.stepped(steps_);
        if (all.call == Call::Join) return;
    }
  }
}

/// Ranks that step have the same constants. Those that have joined do not follow the others'
/// schedules: they take what the first rank that steps has.
void Runtime::take_rules(std::span<const Collective> ranks) {
  auto first = std::find_if(ranks.begin(), ranks.end(),
                            [](const Collective& one) { return one.call != Call::Join; });
  if (first == ranks.end()) first = ranks.begin();
  const auto other = [&](const Collective& one) { return one.rules != first->rules; };
  if (std::none_of(ranks.begin(), ranks.end(), other)) return;
  static_assert(std::is_trivially_copyable_v<Optimizer>);
  std::vector<Optimizer> theirs = groups_;
  control_->broadcast(std::as_writable_bytes(std::span(theirs)),
                      static_cast<int>(first - ranks.begin()));
  if (ranks[static_cast<std::size_t>(rank())].call == Call::Join) {
    groups_ = std::move(theirs);
    rules_.store(hash_of(groups_), std::memory_order_relaxed);
  }
  if (std::none_of(ranks.begin(), ranks.end(),
                   [&](const Collective& one) { return one.call != Call::Join && other(one); })) {
    return;
  }
  Settings rules;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    rules.add(fmt::format("the optimizer of group {}", i), text_of(groups_[i]));
  }
  rules.require_equal(*control_);
}

StepResult Runtime::step_together(const std::function<void(Page&)>& bumped) {
  PAGODA_TRACE("engine", "step");
  try {
    if (!alone()) take_rules(ranks_met_);
    check_order();

    std::vector<TrainedPage*> pages;
    for (const auto& page : trained_) {
      if (!page->filled()) continue;
      pages.push_back(page.get());
      // The update before is over, on all ranks from the exchange below on: nobody reads what it
      // left any more.
      pager_->await_version(*page->page);
    }
    pager_->find_raw_writes();
    bool wrote = false;
    for (Page* page : pager_->pages()) {
      if (page != nullptr && page->shared && (page->dirty || page->own_copy)) wrote = true;
    }
    if (!alone()) {
      std::array<std::uint64_t, 2> flags = {wrote ? 1U : 0U, early_->given_up() ? 1U : 0U};
      control_->all_reduce_max(flags);
      wrote = flags[0] != 0;
      if (flags[1] != 0) early_->give_up();
    }
    publish_writes(wrote);

    StepResult result;
    double factor = 1 / scale_.scale();
    bool clipped = false;
    bool finite = true;
    if (config_.clip > 0 || scales_loss()) {
      const double norm =
          gradient_norm(trained_, pager_->sharding(), control_.get()) / scale_.scale();
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
      gather_gradients(apart, *tiers_, pager_->sharding(), config_.bucket, *control_);
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
    whereabouts_.stepped(steps_);
    std::vector<Page*> pending;
    pending.reserve(pages.size());
    for (const TrainedPage* page : pages) pending.push_back(page->page);
    for (TrainedPage* page : starting) {
      for (optim::TrainedParameter& parameter : page->parameters) parameter.used = parameter.filled;
    }
    const std::vector<Page*> exposed = pager_->owe(pending);
    updater_->release(begun);
    updater_->start(
        starting, std::make_shared<const optim::StepScalars>(optim::StepScalars{factor, groups_}));
    early_->step_ends(clipped);
    for (TrainedPage* page : pages) {
      optim::Gradients::clear(*page);
      bumped(*page->page);
    }
    updater_->follow(update_order(std::move(pages)));
    pager_->refresh(exposed);
    return result;
  } catch (...) {
    fail_and_throw();
  }
}

/// What user code has written goes to the homes: updates start from those. `shards`: on some rank,
/// to shards that others read.
void Runtime::publish_writes(bool shards) {
  for (Page* page : pager_->pages()) {
    if (page != nullptr && (page->dirty || page->own_copy)) pager_->publish(*page);
  }
  // Nobody may read a shard before everyone has published it.
  if (shards && !alone()) control_->barrier();
}

/// Gradients are exchanged in the order in which they last came on the first rank.
void Runtime::agree_on_order() {
  std::vector<std::uint32_t> order = reducer_->arrival_order();
  std::vector<bool> seen(trained_.size());
  for (const std::uint32_t number : order) seen[number] = true;
  for (std::uint32_t number = 0; number < trained_.size(); ++number) {
    if (!seen[number]) order.push_back(number);
  }
  control_->broadcast(std::as_writable_bytes(std::span(order)), 0);
  std::vector<TrainedPage*> pages;
  pages.reserve(order.size());
  for (const std::uint32_t number : order) pages.push_back(trained_[number].get());
  reducer_->set_order(std::move(pages));
}

/// The order in which the next forward will need them, as far as it is known.
std::vector<TrainedPage*> Runtime::update_order(std::vector<TrainedPage*> pages) {
  const auto lock = pager_->lock();
  std::stable_sort(pages.begin(), pages.end(), [&](const TrainedPage* a, const TrainedPage* b) {
    return oracle_->next_use(a->page->id) < oracle_->next_use(b->page->id);
  });
  return pages;
}

}  // namespace pagoda::engine

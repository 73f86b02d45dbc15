// SPDX-License-Identifier: Apache-2.0
// Runtime::step(): which pages owe an update, with which factor, and in which order they are made.
#include <algorithm>
#include <array>
#include <cmath>
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
  bool all_leaving = false;
  const StepResult result = step_together(false, all_leaving, bumped);
  trace_.stepped(steps_);
  return result;
}

void Runtime::join(const std::function<void(Page&)>& bumped) {
  for (bool all_leaving = false; !all_leaving;) {
    step_together(true, all_leaving, bumped);
    trace_.stepped(steps_);
  }
}

StepResult Runtime::step_together(bool leaving, bool& all_leaving,
                                  const std::function<void(Page&)>& bumped) {
  check();
  PAGODA_TRACE("engine", "step");
  try {
    await_gradients();
    check_order();

    std::vector<TrainedPage*> pages;
    for (const auto& page : trained_) {
      if (!page->filled()) continue;
      pages.push_back(page.get());
      // The update before is over, on all ranks from the exchange below on: nobody reads what it
      // left any more.
      if (!page->begun) pager_->await_version(*page->page);
    }
    bool wrote = false;
    for (Page* page : pager_->pages()) {
      if (page != nullptr && !page->whole_home() && (page->dirty || page->own_copy)) wrote = true;
    }
    if (!alone()) {
      std::array<std::uint64_t, 2> flags = {wrote ? 1U : 0U, leaving ? 0U : 1U};
      control_->all_reduce_max(flags);
      wrote = flags[0] != 0;
      all_leaving = flags[1] == 0;
    } else {
      all_leaving = leaving;
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
      early_->step_begins(trained_, clipped);
      result.step = steps_;
      return result;
    }
    std::vector<TrainedPage*> starting;  // the others have begun
    std::copy_if(pages.begin(), pages.end(), std::back_inserter(starting),
                 [](const TrainedPage* page) { return !page->begun; });
    if (config_.zero == 0 && !alone())
      gather_gradients(starting, *tiers_, pager_->sharding(), config_.bucket, gradients_->scratch(),
                       *control_);
    std::vector<TrainedPage*> given_up;
    if (clipped) given_up = give_up_early(pages);
    starting.insert(starting.end(), given_up.begin(), given_up.end());
    if (!pages.empty()) result.step = ++steps_;
    std::vector<Page*> owing;
    owing.reserve(starting.size());
    for (TrainedPage* page : starting) {
      for (optim::TrainedParameter& parameter : page->parameters) parameter.used = parameter.filled;
      owing.push_back(page->page);
    }
    pager_->owe(owing);
    updater_->undo(given_up);
    updater_->start(
        starting, std::make_shared<const optim::StepScalars>(optim::StepScalars{factor, groups_}));
    early_->step_begins(trained_, clipped);
    for (TrainedPage* page : pages) {
      optim::Gradients::clear(*page);
      bumped(*page->page);
    }
    updater_->follow(update_order(std::move(pages)));
    return result;
  } catch (...) {
    fail_and_throw();
  }
}

/// Ends the updates of `pages` that began on trust that nothing would be clipped, and returns these
/// pages: they are to be undone and started again. The same on all ranks, of which none waits for
/// such an update any more.
std::vector<TrainedPage*> Runtime::give_up_early(std::span<TrainedPage* const> pages) {
  std::vector<TrainedPage*> out;
  std::copy_if(pages.begin(), pages.end(), std::back_inserter(out),
               [](const TrainedPage* page) { return page->begun; });
  if (out.empty()) return out;
  PAGODA_TRACE("engine", "give up early updates", {"pages", out.size()});
  updater_->give_up(out);
  for (TrainedPage* page : out) {
    pager_->await_version(*page->page);
    page->begun = false;
  }
  // No rank reads what is undone next.
  if (!alone()) control_->barrier();
  return out;
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

// SPDX-License-Identifier: Apache-2.0
// Runtime::attach(): does it fit, is it equal on all ranks, and where does everything go.
#include <algorithm>
#include <numeric>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/fit.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/runtime.h"
#include "pagoda/io/checksum.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using PagerPlacement = pager::Placement;
using pager::Range;
using pager::Tier;

/// A gradient that comes before its turn waits on the host (Reducer::park): there is room for two.
std::vector<Bytes> gradients_in_wait(const std::vector<Page*>& pages, bool alone) {
  if (alone) return {};
  Bytes largest = 0;
  for (const Page* page : pages) largest = std::max(largest, page->bytes());
  return {largest, largest};
}

}  // namespace

void Runtime::attach(const std::vector<Page*>& pages, std::vector<TrainedSpec> specs,
                     std::vector<Optimizer> groups) {
  check();
  PAGODA_REQUIRE(trained_.empty(), "a model is attached already: release() it first");
  PAGODA_TRACE("engine", "attach");
  try {
    groups_ = std::move(groups);
    for (TrainedSpec& spec : specs) {
      auto page = std::make_unique<TrainedPage>();
      page->page = spec.page;
      page->number = static_cast<std::uint32_t>(trained_.size());
      page->dtype = spec.dtype;
      page->gradient_dtype =
          config_.gradient_dtype == GradientType::Fp32 ? kernels::Dtype::F32 : spec.dtype;
      page->segments = std::move(spec.segments);
      page->parameters = std::move(spec.parameters);
      page->reduced = pager_->shard_of(*spec.page);
      page->updated = config_.zero == 0 ? Range{0, spec.page->elements} : page->reduced;
      page->gradient_range = page->updated;
      trained_.push_back(std::move(page));
    }
    pages_ = pages;
    std::vector<TrainedPage*> order;  // gradients come last parameter first, until more is known
    for (auto page = trained_.rbegin(); page != trained_.rend(); ++page) {
      order.push_back(page->get());
    }
    const Fit fit = plan_fit(pages, reducer_->host_bytes(order));
    fit.check();
    reducer_->set_order(std::move(order));  // takes its buffers before states fill the host
    norms_ = tiers_->budget(Tier::Host).reserve(gradient_norm_bytes(trained_, ranks()),
                                                pager::tag::kNorms);
    {
      const auto lock = pager_->lock();
      for (Page* page : pages_) page->attached = true;
    }
    if (!alone()) check_equal_on_all_ranks(pages);
    place(pages, fit);
    for (const auto& page : trained_) {
      const Optimizer& rule = groups_[page->parameters[0].group];
      const optim::StateLayout layout = updater_->layout(*page, rule);
      page->gradient = tiers_->allocate(page->gradient_bytes(), pager_placement(config_.gradients),
                                        pager::tag::kGradients, page->page->name);
      page->state =
          tiers_->allocate(layout.bytes(page->updated.size()), pager_placement(config_.optimizer),
                           pager::tag::kOptimizer, page->page->name);
      updater_->add(*page, rule);
    }
    if (early_mode() == EarlyUpdates::Mode::OnTrust) make_room_to_undo();
    if (!alone()) control_->barrier();  // from here on others may pull
    left_free_ = {};                    // what was left is for activations now
    trace_.stepped(steps_);
  } catch (const UserError&) {
    forget_trained();
    if (!alone()) fail(std::current_exception());  // the others wait for this rank
    throw;
  } catch (...) {
    forget_trained();
    fail_and_throw();
  }
}

/// What it takes to undo updates, as far as the host has room beside all that must be there. Where
/// it has none, or states lie elsewhere, updates wait for step(): on all ranks or on none.
void Runtime::make_room_to_undo() {
  Bytes expected = 0;
  for (const auto& page : trained_) {
    if (const auto bytes = updater_->undo_bytes(*page)) {
      expected += bytes->state + bytes->parameters;
    }
  }
  tiers_->host().expect(pager::tag::kUndo, expected);
  const std::vector<Bytes> waiting = gradients_in_wait(pages_, alone());
  const auto in_wait = tiers_->budget(Tier::Host)
                           .try_reserve(std::accumulate(waiting.begin(), waiting.end(), Bytes{0}),
                                        pager::tag::kGradients);
  std::vector<std::uint64_t> cannot(trained_.size(), 1);
  // The gradients that come first gain most.
  for (auto last = trained_.rbegin(); last != trained_.rend() && in_wait; ++last) {
    TrainedPage& page = **last;
    const auto on_host = [&](Bytes bytes) {
      return tiers_->try_allocate_on_host(bytes, pager::tag::kUndo, page.page->name);
    };
    const auto bytes = updater_->undo_bytes(page);
    auto spare = bytes ? on_host(bytes->state) : std::nullopt;
    auto before = spare ? on_host(bytes->parameters) : std::nullopt;
    if (!before) continue;
    page.spare = std::move(*spare);
    page.before = std::move(*before);
    cannot[page.number] = 0;
  }
  if (!alone()) control_->all_reduce_max(cannot);
  for (const auto& page : trained_) {
    page->can_be_undone = cannot[page->number] == 0;
    if (page->can_be_undone) continue;
    page->spare = {};
    page->before = {};
  }
  const auto without = std::accumulate(cannot.begin(), cannot.end(), std::uint64_t{0});
  if (without == 0) return;
  log::warn("engine",
            "clip_ahead: some updates wait for step(): their states are not in host memory, or it "
            "has no room for what undoes them",
            {{"pages", without}, {"of", trained_.size()}});
}

void Runtime::forget_trained() {
  reducer_->set_order({});
  for (const auto& page : trained_) updater_->remove(*page);
  trained_.clear();
  norms_ = {};
  const auto lock = pager_->lock();
  for (Page* page : pages_) page->attached = false;
  pages_.clear();
}

void Runtime::detach() {
  settle();
  reducer_->set_order({});
  forget_trained();
}

/// Law 2: a plan that cannot fit fails before step 1 and says what would make it fit.
Fit Runtime::plan_fit(const std::vector<Page*>& pages, Bytes buffers) {
  Fit fit(*tiers_);
  fit.need_buffers(buffers + gradient_norm_bytes(trained_, ranks()));
  fit.parameters.placement = pager_placement(config_.parameters);
  fit.gradients.placement = pager_placement(config_.gradients);
  fit.optimizer.placement = pager_placement(config_.optimizer);
  for (const Page* page : pages) {
    const Range range = config_.zero == 3 ? pager_->shard_of(*page) : Range{0, page->elements};
    fit.parameters.pages.push_back(range.size() * page->element_size);
    fit.hold(page->home);
    fit.need_page(page->name, page->bytes());
  }
  for (const auto& page : trained_) {
    const Optimizer& rule = groups_[page->parameters[0].group];
    for (const optim::TrainedParameter& parameter : page->parameters) {
      PAGODA_REQUIRE_EQ(groups_[parameter.group].index(), rule.index(),
                        "parameters that share the storage '{}' need one kind of optimizer",
                        page->page->name);
    }
    fit.gradients.pages.push_back(page->gradient_bytes());
    fit.optimizer.pages.push_back(updater_->layout(*page, rule).bytes(page->updated.size()));
    fit.need_gradient(page->page->name, page->page->bytes());
  }
  fit.waiting.pages = gradients_in_wait(pages, alone());
  // Where there is room for all of them, operators need not wait for any.
  const bool whole = config_.zero != 3 || alone();
  if (whole && fit.parameters.placement == PagerPlacement::Auto && fit.parameters_fit_on_device()) {
    fit.parameters.placement = PagerPlacement::Device;
  }
  for (const auto& [need, tag] : {std::pair{&fit.gradients, pager::tag::kGradients},
                                  std::pair{&fit.optimizer, pager::tag::kOptimizer}}) {
    const bool on_host =
        need->placement != PagerPlacement::Nvme && need->placement != PagerPlacement::Device;
    Bytes blocks = 0;
    for (const Bytes page : need->pages) blocks += pager::Tiers::nvme_bytes(page);
    if (on_host) tiers_->host().expect(tag, blocks);
  }
  return fit;
}

void Runtime::check_equal_on_all_ranks(const std::vector<Page*>& pages) {
  struct Sum {
    std::uint64_t elements;
    std::uint64_t contents;
  };
  std::vector<Sum> mine;
  const std::span<std::byte> buffer = gradients_->scratch();  // none is on its way yet
  for (Page* page : pages) {
    pager_->write_back(*page);
    std::uint64_t contents = 0;
    for (Bytes at = 0; at < page->bytes();) {
      const std::span piece(buffer.data(), std::min<Bytes>(buffer.size(), page->bytes() - at));
      tiers_->read(page->home, at, piece);
      contents = contents * 0x9E3779B97F4A7C15U + io::checksum(piece);
      at += piece.size();
    }
    mine.push_back({page->elements, contents});
  }
  std::array<std::uint64_t, 1> count = {pages.size()};
  control_->all_reduce_max(count);
  PAGODA_REQUIRE_EQ(pages.size(), count[0], "ranks have models of different numbers of parameters");
  std::vector<Sum> first = mine;
  control_->broadcast(std::as_writable_bytes(std::span(first)), 0);
  std::uint64_t differing = 0;
  const Page* where = nullptr;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i].elements == first[i].elements && mine[i].contents == first[i].contents) continue;
    ++differing;
    if (where == nullptr) where = pages[i];
  }
  PAGODA_REQUIRE(differing == 0,
                 "rank {} starts with other values than rank 0 in {} of {} parameters, '{}' first: "
                 "seed the ranks alike before the model is built, or load the same weights",
                 world_->rank(), differing, mine.size(), where->name);
  control_->barrier();
}

void Runtime::place(const std::vector<Page*>& pages, const Fit& fit) {
  const PagerPlacement wanted = fit.parameters.placement;
  // What is placed on the device takes room that pages have which are only there by chance.
  const auto there = [](const StateNeed& state) {
    return state.placement == PagerPlacement::Device;
  };
  if (there(fit.parameters) || there(fit.gradients) || there(fit.optimizer)) {
    for (Page* page : pages) pager_->evict(*page);
  }
  if (config_.zero == 3 && !alone()) {
    for (Page* page : pages) pager_->set_home_range(*page, pager_->shard_of(*page), wanted);
    return;
  }
  if (wanted != PagerPlacement::Device) return;
  for (Page* page : pages) pager_->fix(*page);
}

}  // namespace pagoda::engine

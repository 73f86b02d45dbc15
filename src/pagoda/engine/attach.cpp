// SPDX-License-Identifier: Apache-2.0
// Runtime::attach(): does it fit, is it equal on all ranks, and where does everything go.
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/fit.h"
#include "pagoda/engine/runtime.h"

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

/// Whether all ranks have buffers of the same names and sizes: others cannot be compared.
bool equal_buffers(const std::vector<BufferSpec>& buffers, comm::Group& group) {
  Settings mine;
  for (const BufferSpec& buffer : buffers) mine.add(buffer.name, std::to_string(buffer.bytes));
  try {
    mine.require_equal(group);
    return true;
  } catch (const Diverged& error) {
    if (group.rank() == 0) {
      log::warn("engine", "the model's buffers are left as they are on each rank",
                {{"cause", error.message()}});
    }
    return false;
  }
}

}  // namespace

std::vector<Page*> Runtime::attach(const std::vector<Page*>& pages, std::vector<TrainedSpec> specs,
                                   std::vector<Optimizer> groups) {
  return attach([&] { return ModelSpec{pages, std::move(specs), std::move(groups), {}}; });
}

std::vector<Page*> Runtime::attach(const std::function<ModelSpec()>& describe) {
  check();
  PAGODA_REQUIRE(trained_.empty(), "a model is attached already: release() it first");
  PAGODA_TRACE("engine", "attach");
  const Whereabouts::Inside inside(whereabouts_, in_call(Call::Attach).where());
  meet(in_call(Call::Attach));
  try {
    ModelSpec model;
    all_or_none(control_.get(), [&] { model = describe(); });
    if (!alone()) settings(model).require_equal(*control_);
    std::optional<Fit> fit;
    all_or_none(control_.get(), [&] { fit.emplace(prepare(model)); });
    // What build() wrote goes home: once attached, it would wait in a copy for the first step().
    for (Page* page : pages_) pager_->write_back(*page);
    std::vector<Page*> overwritten;
    if (!alone()) {
      shards_->share(model.pages);
      overwritten = start_with_values_of_rank_0(model, *fit);
    }
    all_or_none(control_.get(), [&] {
      place(model.pages, *fit);
      allocate_states();
    });
    {
      const auto lock = pager_->lock();
      for (Page* page : pages_) page->attached = true;
    }
    if (early_mode() != EarlyUpdates::Mode::Never) make_room_for_early_updates();
    left_free_ = {};  // what was left is for activations now
    trace_.stepped(steps_);
    return overwritten;
  } catch (const NoneDid& stopped) {
    forget_trained();
    std::rethrow_exception(stopped.error);
  } catch (const Diverged&) {  // on all ranks, before anything has changed
    forget_trained();
    throw;
  } catch (...) {
    forget_trained();
    fail_and_throw();
  }
}

/// Everything that needs no other rank, and moves nothing.
Fit Runtime::prepare(ModelSpec& model) {
  for (const Optimizer& rule : model.groups) optim::require_valid(rule);
  groups_ = std::move(model.groups);
  rules_.store(hash_of(groups_), std::memory_order_relaxed);
  pages_ = model.pages;
  add_trained(model.trained);
  std::vector<TrainedPage*> order;  // gradients come last parameter first, until more is known
  for (auto page = trained_.rbegin(); page != trained_.rend(); ++page) {
    order.push_back(page->get());
  }
  Fit fit = plan_fit(pages_, reducer_->host_bytes(order));
  fit.check();
  reducer_->set_order(std::move(order));  // takes its buffers before states fill the host
  return fit;
}

void Runtime::add_trained(std::vector<TrainedSpec>& specs) {
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
}

/// What would make ranks diverge if it differed. Budgets, places, threads and the number of
/// micro-batches may.
Settings Runtime::settings(const ModelSpec& model) const {
  Settings out;
  for (const char* key : {"zero", "gradient_dtype", "reduction", "clip", "clip_ahead", "loss_scale",
                          "loss_scale_initial", "loss_scale_minimum", "loss_scale_window", "master",
                          "moments", "seed", "bucket", "initial"}) {
    out.add(key, config_.get(key));
  }
  out.add("the number of parameters", std::to_string(model.pages.size()));
  std::vector<const TrainedSpec*> trained(model.pages.size());
  for (const TrainedSpec& spec : model.trained) {
    const auto at = std::find(model.pages.begin(), model.pages.end(), spec.page);
    trained[static_cast<std::size_t>(at - model.pages.begin())] = &spec;
  }
  for (std::size_t i = 0; i < model.pages.size(); ++i) {
    std::string groups;
    if (trained[i] != nullptr) {
      for (const optim::TrainedParameter& parameter : trained[i]->parameters) {
        groups += fmt::format("{}{}", groups.empty() ? "" : ", ", parameter.group);
      }
    }
    const Page& page = *model.pages[i];
    out.add(fmt::format("parameter {}", i),
            fmt::format("'{}' ({} elements of {} bytes, {})", page.name, page.elements,
                        page.element_size,
                        trained[i] == nullptr ? "not trained" : "trained in group " + groups));
  }
  out.add("the number of groups", std::to_string(model.groups.size()));
  for (std::size_t i = 0; i < model.groups.size(); ++i) {
    out.add(fmt::format("the optimizer of group {}", i), text_of(model.groups[i]));
  }
  return out;
}

void Runtime::allocate_states() {
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
}

/// What early updates take beside gradients and states, as far as the host has room beside all that
/// must be there. Where it has none, or states lie elsewhere, updates wait for step().
void Runtime::make_room_for_early_updates() {
  const bool reversible = early_mode() == EarlyUpdates::Mode::Reversible;
  Bytes expected = 0;
  for (const auto& page : trained_) {
    if (const auto bytes = updater_->early_bytes(*page, reversible)) {
      expected += bytes->spare + bytes->next;
    }
  }
  if (expected > 0) tiers_->host().expect(pager::tag::kEarly, expected);
  const std::vector<Bytes> waiting = gradients_in_wait(pages_, alone());
  const auto in_wait = tiers_->budget(Tier::Host)
                           .try_reserve(std::accumulate(waiting.begin(), waiting.end(), Bytes{0}),
                                        pager::tag::kGradients);
  std::vector<std::uint64_t> cannot(trained_.size());
  // The gradients that come first gain most.
  for (auto last = trained_.rbegin(); last != trained_.rend(); ++last) {
    TrainedPage& page = **last;
    const auto on_host = [&](Bytes bytes) {
      return tiers_->try_allocate_on_host(bytes, pager::tag::kEarly, page.page->name);
    };
    const auto bytes = updater_->early_bytes(page, reversible);
    if (bytes && bytes->spare + bytes->next == 0) continue;
    auto spare = bytes && in_wait ? on_host(bytes->spare) : std::nullopt;
    auto next = spare ? on_host(bytes->next) : std::nullopt;
    if (!next) {
      cannot[page.number] = 1;
      continue;
    }
    if (reversible) page.spare = std::move(*spare);
    page.next = std::move(*next);
  }
  if (!alone()) control_->all_reduce_max(cannot);  // one rank's no is enough
  for (const auto& page : trained_) {
    if (cannot[page->number] == 0) continue;
    page->spare = {};
    page->next = {};
  }
  const auto without = std::accumulate(cannot.begin(), cannot.end(), std::uint64_t{0});
  if (without == 0 || !reversible) return;
  log::warn("engine",
            "clip_ahead: some updates wait for step(): their states are not in host memory, or it "
            "has no room for what rolls them back",
            {{"pages", without}, {"of", trained_.size()}});
}

/// A page of which this rank has a shard stays, also if its storage dies: others may read it.
void Runtime::forget_trained() {
  reducer_->set_order({});
  for (const auto& page : trained_) updater_->remove(*page);
  early_->forget();
  trained_.clear();
  const auto lock = pager_->lock();
  for (Page* page : pages_) page->attached = !page->whole_home();
  pages_.clear();
}

void Runtime::release(const std::function<void()>& copy) {
  const Whereabouts::Inside inside(whereabouts_, in_call(Call::Release).where());
  meet(in_call(Call::Release));
  try {
    settle();  // what early updates have computed was never seen, and is forgotten
    check_order();
    // Nobody forgets anything before all have what they need of it.
    all_or_none(control_.get(), copy);
    forget_trained();
  } catch (const NoneDid& stopped) {  // none has changed anything
    std::rethrow_exception(stopped.error);
  } catch (const UserError&) {  // updates have begun, on all ranks
    throw;
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::drop(Page& page) {
  if (shards_ != nullptr) shards_->unshare(page);
  pager_->drop(page);
}

/// Law 2: a plan that cannot fit fails before step 1 and says what would make it fit.
Fit Runtime::plan_fit(const std::vector<Page*>& pages, Bytes buffers) {
  Fit fit(*tiers_);
  fit.need_buffers(buffers);
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

/// DDP's rule: what rank 0 has is what training starts from. Returns the pages that were changed
/// here.
std::vector<Page*> Runtime::start_with_values_of_rank_0(const ModelSpec& model, const Fit& fit) {
  for (Page* page : model.pages) pager_->fill_blank(*page);
  std::vector<BufferSpec> buffers;
  if (equal_buffers(model.buffers, *control_)) buffers = model.buffers;
  InitialValues values(*control_, *pager_);
  values.compare(model.pages, buffers, config_.staging);
  if (values.differing() == 0) return {};
  if (config_.initial == Initial::Check) {
    throw Diverged(fmt::format(
        "ranks start with other values than rank 0: {}. Seed the ranks alike before the model is "
        "built, load the same weights, or leave it to rank 0 (initial=\"broadcast\")",
        values.text()));
  }
  std::vector<Page*> here = values.differing_here();
  const bool shards = config_.zero == 3;
  all_or_none(control_.get(), [&] {
    for (Page* page : here) {
      PAGODA_REQUIRE(pager_->evict(*page) || page->fixed,
                     "parameter '{}' is pinned, and gets rank 0's values: end the pin before "
                     "attach()",
                     page->name);
    }
    // What this rank keeps comes into what it keeps it in. Rank 0 needs whole pages until then.
    if (shards && rank() != 0) place(model.pages, fit);
  });
  values.send(shards);
  values.send_buffers();
  if (rank() == 0) {
    log::warn("engine", "ranks started with different values: all have those of rank 0 now",
              {{"differed", values.text()}});
  }
  return here;
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

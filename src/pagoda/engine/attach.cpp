// SPDX-License-Identifier: Apache-2.0
// Runtime::attach(): does it fit, and is it equal on all ranks.
#include <algorithm>
#include <optional>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/engine/fit.h"
#include "pagoda/engine/runtime.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using pager::Range;

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

Bytes least_of_all(Bytes mine, comm::Group& group) {
  std::uint64_t larger = ~std::uint64_t{mine};
  group.all_reduce_max({&larger, 1});
  return ~larger;
}

}  // namespace

std::vector<Page*> Runtime::attach(const std::vector<Page*>& pages, std::vector<TrainedSpec> specs,
                                   std::vector<Optimizer> groups, std::vector<FrozenSpec> frozen) {
  return attach([&] {
    return ModelSpec{pages, std::move(specs), std::move(groups), {}, std::move(frozen)};
  });
}

std::vector<Page*> Runtime::attach(const std::function<ModelSpec()>& describe,
                                   const std::function<void()>& watch) {
  check();
  PAGODA_REQUIRE(!attached(), "a model is attached already: release() it first");
  PAGODA_TRACE("engine", "attach");
  const Whereabouts::Inside inside(ranks_.whereabouts(), where_in(Call::Attach));
  meet(in_call(Call::Attach));
  try {
    ModelSpec model;
    all_or_none(ranks_.control(), [&] {
      model = describe();
      for (const FrozenSpec& spec : model.frozen) {
        if (!spec.obstacle.empty()) continue;
        model.trained.at(spec.page).parameters.at(spec.in_page).frozen = true;
      }
    });
    if (!alone()) settings(model).require_equal(*ranks_.control());
    std::optional<Fit> fit;
    all_or_none(ranks_.control(), [&] { fit.emplace(prepare(model)); });
    // What build() wrote goes home: once attached, it would wait in a copy for the first step().
    all_or_none(ranks_.control(), [&] {
      for (Page* page : pages_) pager_->write_back(*page);
      if (!alone()) {
        for (Page* page : pages_) pager_->fill_blank(*page);
      }
    });
    std::vector<Page*> overwritten;
    if (!alone()) {
      shards_->share(model.pages);
      gather_bytes_ = least_of_all(config_.staging, *ranks_.control());
      overwritten = start_with_values_of_rank_0(model, *fit);
    }
    std::vector<TrainedPage*> all;
    all_or_none(ranks_.control(), [&] {
      placer_->place(model.pages, *fit);
      for (const auto& page : trained_) {
        placer_->take_homes(*page);
        updater_->add(*page, rules_.at_attach(*page));
        all.push_back(page.get());
      }
    });
    for (Page* page : pages_) pager_->set_attached(*page, true);
    placer_->make_room_for_early_updates(pages_, all, early_mode(), ranks_.control());
    if (watch) all_or_none(ranks_.control(), watch);  // nothing that may fail comes after it
    left_free_ = {};                                  // what was left is for activations now
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
  rules_.assign(std::move(model.groups));
  pages_ = model.pages;
  pager_->forget_user_writes(pages_);  // before they were attached, all ranks have agreed on them
  reducer_->set_pages(model.trained.size());
  std::vector<std::unique_ptr<TrainedPage>> made;
  for (TrainedSpec& spec : model.trained) {
    made.push_back(make_trained(std::move(spec), made.size()));
  }
  keep_frozen(model.frozen, std::move(made));
  std::vector<TrainedPage*> order = first_order();
  Fit fit = placer_->plan(pages_, trained_, reducer_->host_bytes(order));
  fit.check();
  reducer_->set_order(std::move(order));  // takes its buffers before states fill the host
  return fit;
}

std::unique_ptr<TrainedPage> Runtime::make_trained(TrainedSpec spec, std::size_t number) const {
  auto page = std::make_unique<TrainedPage>();
  page->page = spec.page;
  page->number = static_cast<std::uint32_t>(number);
  page->dtype = spec.dtype;
  page->gradient_dtype =
      config_.gradient_dtype == GradientType::Fp32 ? kernels::Dtype::F32 : spec.dtype;
  page->segments = std::move(spec.segments);
  page->parameters = std::move(spec.parameters);
  page->reduced = pager_->shard_of(*spec.page);
  page->updated = config_.zero == 0 ? Range{0, spec.page->elements} : page->reduced;
  page->gradient_range = page->updated;
  return page;
}

/// Gradients come last parameter first, until more is known.
std::vector<TrainedPage*> Runtime::first_order() const {
  std::vector<TrainedPage*> order;
  for (auto page = trained_.rbegin(); page != trained_.rend(); ++page) {
    order.push_back(page->get());
  }
  return order;
}

/// What would make ranks diverge if it differed. Budgets, places, threads and the number of
/// micro-batches may.
Settings Runtime::settings(const ModelSpec& model) const {
  Settings out;
  for (const char* key : {"zero", "gradient_dtype", "reduction", "clip", "clip_ahead",
                          "early_updates", "loss_scale", "loss_scale_initial", "loss_scale_minimum",
                          "loss_scale_window", "master", "moments", "seed", "bucket", "initial"}) {
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
        groups += fmt::format("{}{}{}", groups.empty() ? "" : ", ", parameter.group,
                              parameter.frozen ? " once it is thawed" : "");
      }
    }
    const Page& page = *model.pages[i];
    out.add(fmt::format("parameter {}", i),
            fmt::format("'{}' ({} elements of {} bytes, {})", page.name(), page.elements,
                        page.element_size,
                        trained[i] == nullptr ? "not trained" : "trained in group " + groups));
  }
  for (std::size_t i = 0; i < model.frozen.size(); ++i) {
    out.add(fmt::format("frozen parameter {}", i), model.frozen[i].name);
  }
  out.add("the number of groups", std::to_string(model.groups.size()));
  for (std::size_t i = 0; i < model.groups.size(); ++i) {
    out.add(fmt::format("the optimizer of group {}", i), text_of(model.groups[i]));
  }
  return out;
}

/// Pages of which ranks have shards stay, also if their storage dies: others may read them.
void Runtime::forget_trained() {
  take_joined();
  reducer_->set_order({});
  for (const auto& page : trained_) updater_->remove(*page);
  early_->forget();
  trained_.clear();
  frozen_->reset({}, {});
  const bool sharded = config_.zero == 3 && !alone();
  for (Page* page : pages_) {
    if (shards_ != nullptr && !sharded) shards_->unshare(*page);
    pager_->set_attached(*page, sharded && shards_->is_shared(*page));
  }
  pages_.clear();
}

void Runtime::undo_attach(const std::function<void()>& copy) {
  try {
    copy();
    std::uint64_t done = 1;
    if (!alone()) ranks_.control()->all_reduce_max({&done, 1});
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::release(const std::function<void()>& copy) {
  const Whereabouts::Inside inside(ranks_.whereabouts(), where_in(Call::Release));
  meet(in_call(Call::Release));
  try {
    settle();  // what early updates have computed was never seen, and is forgotten
    check_order();
    require_same_writes("release()");
    // Nobody forgets anything before all have what they need of it.
    all_or_none(ranks_.control(), copy);
    forget_trained();
  } catch (const NoneDid& stopped) {  // none has changed anything
    std::rethrow_exception(stopped.error);
  } catch (const UserError&) {  // updates have begun, or writes differ, on all ranks
    throw;
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::drop(Page& page) {
  if (shards_ != nullptr) shards_->unshare(page);
  pager_->drop(page);
}

/// DDP's rule: what rank 0 has is what training starts from. Returns the pages that were changed
/// here.
std::vector<Page*> Runtime::start_with_values_of_rank_0(const ModelSpec& model, const Fit& fit) {
  std::vector<BufferSpec> buffers;
  if (equal_buffers(model.buffers, *ranks_.control())) buffers = model.buffers;
  InitialValues values(*ranks_.control(), *pager_);
  values.compare(model.pages, buffers, gather_bytes_);
  if (values.differing() == 0) return {};
  if (config_.initial == Initial::Check) {
    throw Diverged(fmt::format(
        "ranks start with other values than rank 0: {}. Seed the ranks alike before the model is "
        "built, load the same weights, or leave it to rank 0 (initial=\"broadcast\")",
        values.text()));
  }
  std::vector<Page*> here = values.differing_here();
  const bool shards = config_.zero == 3;
  all_or_none(ranks_.control(), [&] {
    for (Page* page : here) {
      PAGODA_REQUIRE(pager_->evict(*page) || pager_->look(*page).fixed,
                     "parameter '{}' is pinned, and gets rank 0's values: end the pin before "
                     "attach()",
                     page->name());
    }
    // What this rank keeps comes into what it keeps it in. Rank 0 needs whole pages until then.
    if (shards && rank() != 0) placer_->place(model.pages, fit);
  });
  values.send(shards);
  values.send_buffers();
  if (rank() == 0) {
    log::warn("engine", "ranks started with different values: all have those of rank 0 now",
              {{"differed", values.text()}});
  }
  return here;
}

}  // namespace pagoda::engine

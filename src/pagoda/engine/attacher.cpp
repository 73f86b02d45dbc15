// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/attacher.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/engine/initial_values.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using pager::Range;

/// Whether all ranks have buffers of the same names, types and shapes: others cannot be compared.
bool equal_buffers(const std::vector<BufferSpec>& buffers, comm::Group& group) {
  Settings mine;
  for (const BufferSpec& buffer : buffers) {
    mine.add(fmt::format("buffer '{}'", buffer.name),
             fmt::format("{} ({} bytes)", buffer.form, buffer.bytes));
  }
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

std::vector<Page*> Attacher::attach(const std::function<ModelSpec()>& describe,
                                    const std::function<void()>& watch) {
  try {
    ModelSpec model;
    all_or_none(parts_.ranks.control(), [&] {
      model = describe();
      for (const FrozenSpec& spec : model.frozen) {
        if (!spec.obstacle.empty()) continue;
        model.trained.at(spec.page).parameters.at(spec.in_page).frozen = true;
      }
    });
    if (!alone()) settings(model).require_equal(*parts_.ranks.control());
    std::optional<Fit> fit;
    all_or_none(parts_.ranks.control(), [&] { fit.emplace(prepare(model)); });
    // What build() wrote goes home: once attached, it would wait in a copy for the first step().
    all_or_none(parts_.ranks.control(), [&] {
      for (Page* page : parts_.model.pages()) parts_.pager.write_back(*page);
      if (!alone()) {
        for (Page* page : parts_.model.pages()) parts_.pager.fill_blank(*page);
      }
    });
    std::vector<Page*> overwritten;
    if (!alone()) {
      const Bytes piece = least_of_all(parts_.gather.most_piece(), *parts_.ranks.control());
      parts_.gather.set_piece(piece);
      parts_.shards->set_piece(piece);
      parts_.shards->share(model.pages);
      overwritten = start_with_values_of_rank_0(model, *fit);
    }
    std::vector<TrainedPage*> all;
    all_or_none(parts_.ranks.control(), [&] {
      parts_.placer.place(model.pages, *fit);
      for (const auto& page : parts_.model.trained()) {
        parts_.placer.take_homes(*page);
        parts_.updater.add(*page, parts_.rules.at_attach(*page));
        all.push_back(page.get());
      }
    });
    for (Page* page : parts_.model.pages()) parts_.pager.set_attached(*page, true);
    parts_.placer.log_overflow(parts_.model.pages(), all);
    parts_.placer.make_room_for_early_updates(parts_.model.pages(), all, parts_.ranks.control());
    if (watch) all_or_none(parts_.ranks.control(), watch);  // nothing that may fail comes after it
    left_free_ = {};                                        // what was left is for activations now
    return overwritten;
  } catch (const NoneDid& stopped) {
    detach();
    std::rethrow_exception(stopped.error);
  } catch (const Diverged&) {  // on all ranks, before anything has changed
    detach();
    throw;
  } catch (...) {
    detach();
    parts_.ranks.failure().fail_and_throw();
  }
}

/// Everything that needs no other rank, and moves nothing.
Fit Attacher::prepare(ModelSpec& model) {
  parts_.rules.assign(std::move(model.groups));
  parts_.model.set_pages(model.pages);
  // Before they were attached, all ranks have agreed on them.
  parts_.pager.forget_user_writes(parts_.model.pages());
  parts_.reducer.set_pages(model.trained.size());
  std::vector<std::unique_ptr<TrainedPage>> made;
  for (TrainedSpec& spec : model.trained) {
    made.push_back(make_trained(std::move(spec), made.size()));
  }
  parts_.model.set_trained(model.frozen, std::move(made));
  std::vector<TrainedPage*> order = parts_.model.last_first();
  Fit fit = parts_.placer.plan(parts_.model.pages(), parts_.model.trained(),
                               parts_.reducer.host_bytes(order));
  fit.check();
  parts_.reducer.set_order(std::move(order));  // takes its buffers before states fill the host
  return fit;
}

std::unique_ptr<TrainedPage> Attacher::make_trained(TrainedSpec spec, std::size_t number) const {
  auto page = std::make_unique<TrainedPage>();
  page->page = spec.page;
  page->number = static_cast<std::uint32_t>(number);
  page->dtype = spec.dtype;
  page->gradient_dtype =
      parts_.config.gradient_dtype == GradientType::Fp32 ? kernels::Dtype::F32 : spec.dtype;
  page->segments = std::move(spec.segments);
  page->parameters = std::move(spec.parameters);
  page->reduced = parts_.pager.shard_of(*spec.page);
  page->updated = parts_.config.zero == 0 ? Range{0, spec.page->elements} : page->reduced;
  page->gradient_range = page->updated;
  return page;
}

/// What would make ranks diverge if it differed. Budgets, places, threads and the number of
/// micro-batches may.
Settings Attacher::settings(const ModelSpec& model) const {
  Settings out;
  for (const char* key : {"zero", "gradient_dtype", "reduction", "clip", "clip_ahead",
                          "early_updates", "loss_scale", "loss_scale_initial", "loss_scale_minimum",
                          "loss_scale_window", "master", "moments", "seed", "bucket", "initial"}) {
    out.add(key, parts_.config.get(key));
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
  for (const TensorSpec& tensor : model.tensors) {
    out.add(fmt::format("the tensor of parameter '{}'", tensor.name), tensor.form);
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

void Attacher::detach() {
  parts_.model.take_joined();
  parts_.reducer.set_order({});
  for (const auto& page : parts_.model.trained()) parts_.updater.remove(*page);
  parts_.early.forget();
  parts_.model.clear_trained();
  const bool sharded = parts_.config.zero == 3 && !alone();
  for (Page* page : parts_.model.pages()) {
    if (parts_.shards != nullptr && !sharded) parts_.shards->unshare(*page);
    parts_.pager.set_attached(*page, sharded && parts_.shards->is_shared(*page));
  }
  parts_.model.clear_pages();
}

/// DDP's rule: what rank 0 has is what training starts from. Returns the pages that were changed
/// here.
std::vector<Page*> Attacher::start_with_values_of_rank_0(const ModelSpec& model, const Fit& fit) {
  std::vector<BufferSpec> buffers;
  if (equal_buffers(model.buffers, *parts_.ranks.control())) buffers = model.buffers;
  InitialValues values(*parts_.ranks.control(), parts_.pager, parts_.gather.scratch());
  values.compare(model.pages, buffers);
  if (values.differing() == 0) return {};
  if (parts_.config.initial == Initial::Check) {
    throw Diverged(fmt::format(
        "ranks start with other values than rank 0: {}. Seed the ranks alike before the model is "
        "built, load the same weights, or leave it to rank 0 (initial=\"broadcast\")",
        values.text()));
  }
  std::vector<Page*> here = values.differing_here();
  const bool shards = parts_.config.zero == 3;
  all_or_none(parts_.ranks.control(), [&] {
    for (Page* page : here) {
      PAGODA_REQUIRE(parts_.pager.evict(*page) || parts_.pager.look(*page).fixed,
                     "parameter '{}' is pinned, and gets rank 0's values: "
                     "end the pin before attach()",
                     page->name());
    }
    // What this rank keeps comes into what it keeps it in. Rank 0 needs whole pages until then.
    if (shards && parts_.ranks.rank() != 0) parts_.placer.place(model.pages, fit);
  });
  values.send(shards);
  values.send_buffers();
  if (parts_.ranks.rank() == 0) {
    log::info("engine", "broadcast rank 0's values", {{"differed", values.text()}});
  }
  return here;
}

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
// Runtime::attach(): does it fit, is it equal on all ranks, and where does everything go.
#include <algorithm>
#include <numeric>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/runtime.h"
#include "pagoda/io/checksum.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using PagerPlacement = pager::Placement;
using pager::Range;
using pager::Tier;

/// Bytes of one state, and where they may go.
struct Need {
  std::string_view state;
  PagerPlacement placement;
  Bytes bytes = 0;
  Bytes blocks = 0;  // the same on NVMe, in whole blocks

  void add(Bytes page) {
    bytes += page;
    blocks += pager::Tiers::nvme_bytes(page);
  }
};

/// A gradient that comes before its turn waits on the host (Reducer::park): there is room for two.
Need gradients_in_wait(const std::vector<Page*>& pages, bool alone) {
  Need out{"gradients in wait", PagerPlacement::Auto};
  if (alone) return out;
  Bytes largest = 0;
  for (const Page* page : pages) largest = std::max(largest, page->bytes());
  for (int i = 0; i < 2; ++i) out.add(largest);
  return out;
}

/// What a tier may hold, and what of it is free.
struct Room {
  Bytes limit = 0;
  Bytes free = 0;
};

/// A budget that is enough, so that it reads well.
std::string enough(const Room& room, Bytes missing) {
  return format_bytes(align_up(room.limit + missing, pager::Tiers::kNvmeBlock));
}

/// Fills the tiers from the top, as allocation will; throws where something stays over.
void fit(const std::vector<Need>& needs, const Room& device, const Room& host, const Room& nvme,
         bool has_nvme) {
  Bytes device_free = device.free;
  Bytes host_free = host.free;
  Bytes nvme_free = nvme.free;
  std::string list;
  Bytes missing = 0;
  Bytes missing_device = 0;
  bool host_helps = false;
  for (const Need& need : needs) {
    list += fmt::format("{}{} {} ({})", list.empty() ? "" : ", ", need.state,
                        format_bytes(need.bytes), pager::name(need.placement));
    Bytes rest = need.bytes;
    if (need.placement == PagerPlacement::Device) {
      const Bytes here = std::min(rest, device_free);
      device_free -= here;
      missing_device += rest - here;
      continue;
    }
    if (need.placement != PagerPlacement::Nvme) {
      const Bytes here = std::min(rest, host_free);
      host_free -= here;
      rest -= here;
    }
    if (has_nvme && rest > 0) rest += need.blocks - need.bytes;
    const Bytes there = has_nvme ? std::min(rest, nvme_free) : 0;
    nvme_free -= there;
    rest -= there;
    missing += rest;
    host_helps = host_helps || (rest > 0 && need.placement != PagerPlacement::Nvme);
  }
  if (missing == 0 && missing_device == 0) return;
  std::string help;
  const auto advise = [&](std::string advice) {
    help += fmt::format("{}{}", help.empty() ? "" : " or ", advice);
  };
  if (missing_device > 0) {
    advise(fmt::format("raise device_budget by {}", format_bytes(missing_device)));
    advise("place some of them on the host");
  } else {
    if (has_nvme) advise(fmt::format("raise nvme_budget to {}", enough(nvme, missing)));
    if (host_helps) advise(fmt::format("raise host_budget to {}", enough(host, missing)));
    if (!has_nvme) advise("set nvme to a directory");
  }
  throw UserError(fmt::format(
      "the model's states do not fit: {}; free are {} on the device, {} on the host{}; {}", list,
      format_bytes(device.free), format_bytes(host.free),
      has_nvme ? fmt::format(" and {} on NVMe", format_bytes(nvme.free)) : "", help));
}

}  // namespace

void Runtime::attach(const std::vector<Page*>& pages, std::vector<TrainedSpec> specs,
                     std::vector<Optimizer> groups, const std::vector<FrozenSpec>& frozen) {
  check();
  PAGODA_REQUIRE(!attached(), "a model is attached already: release() it first");
  PAGODA_TRACE("engine", "attach");
  try {
    groups_ = rules_ = std::move(groups);
    reducer_->set_pages(specs.size());
    std::vector<std::unique_ptr<TrainedPage>> made;
    for (TrainedSpec& spec : specs) made.push_back(make_trained(std::move(spec), made.size()));
    keep_frozen(frozen, std::move(made));
    pages_ = pages;
    reset_order();  // takes the reducer's buffers before states fill the host
    {
      const auto lock = pager_->lock();
      for (Page* page : pages_) page->attached = true;
    }
    check_fit(pages);
    if (!alone()) check_equal_on_all_ranks(pages);
    if (!alone()) check_same_frozen();
    place(pages);
    for (const auto& page : trained_) {
      take_homes(*page);
      updater_->add(*page, rules_[page->parameters[0].group]);
    }
    if (early_mode() == EarlyUpdates::Mode::OnTrust) {
      std::vector<TrainedPage*> all;
      for (const auto& page : trained_) all.push_back(page.get());
      make_room_to_undo(all);
    }
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

/// Takes a page's gradient and state from the budgets.
void Runtime::take_homes(TrainedPage& page) {
  const optim::StateLayout layout = updater_->layout(page, rules_[page.parameters[0].group]);
  page.gradient = tiers_->allocate(page.gradient_bytes(), pager_placement(config_.gradients),
                                   pager::tag::kGradients, page.page->name);
  page.state =
      tiers_->allocate(layout.bytes(page.updated.size()), pager_placement(config_.optimizer),
                       pager::tag::kOptimizer, page.page->name);
}

/// Of gradients that come before their turn.
Bytes Runtime::bytes_in_wait() const {
  return gradients_in_wait(pages_, alone()).bytes;
}

/// What it takes to undo updates of these pages, as far as the host has room beside all that must
/// be there. Where it has none, or states lie elsewhere, updates wait for step(): on all ranks or
/// on none.
void Runtime::make_room_to_undo(std::span<TrainedPage* const> pages) {
  Bytes expected = 0;
  for (const TrainedPage* page : pages) {
    if (const auto bytes = updater_->undo_bytes(*page)) {
      expected += bytes->state + bytes->parameters;
    }
  }
  tiers_->host().expect(pager::tag::kUndo, expected);
  const auto in_wait =
      tiers_->budget(Tier::Host).try_reserve(bytes_in_wait(), pager::tag::kGradients);
  std::vector<std::uint64_t> cannot(pages.size(), 1);
  // The gradients that come first gain most.
  for (std::size_t i = pages.size(); i-- > 0 && in_wait;) {
    TrainedPage& page = *pages[i];
    const auto on_host = [&](Bytes bytes) {
      return tiers_->try_allocate_on_host(bytes, pager::tag::kUndo, page.page->name);
    };
    const auto bytes = updater_->undo_bytes(page);
    auto spare = bytes ? on_host(bytes->state) : std::nullopt;
    auto before = spare ? on_host(bytes->parameters) : std::nullopt;
    if (!before) continue;
    page.spare = std::move(*spare);
    page.before = std::move(*before);
    cannot[i] = 0;
  }
  if (!alone()) control_->all_reduce_max(cannot);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    pages[i]->can_be_undone = cannot[i] == 0;
    if (pages[i]->can_be_undone) continue;
    pages[i]->spare = {};
    pages[i]->before = {};
  }
  const auto without = std::accumulate(cannot.begin(), cannot.end(), std::uint64_t{0});
  if (without == 0) return;
  log::warn("engine",
            "clip_ahead: some updates wait for step(): their states are not in host memory, or it "
            "has no room for what undoes them",
            {{"pages", without}, {"of", pages.size()}});
}

void Runtime::forget_trained() {
  take_joined();
  reducer_->set_order({});
  for (const auto& page : trained_) updater_->remove(*page);
  trained_.clear();
  frozen_->reset({}, {});
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
void Runtime::check_fit(const std::vector<Page*>& pages) {
  Need parameters{"parameters", pager_placement(config_.parameters)};
  Need gradients{"gradients", pager_placement(config_.gradients)};
  Need states{"optimizer", pager_placement(config_.optimizer)};
  Bytes held = 0;  // homes that pages have now and that count as free
  Bytes held_nvme = 0;
  const Page* largest = nullptr;
  for (const Page* page : pages) {
    const Range range = config_.zero == 3 ? pager_->shard_of(*page) : Range{0, page->elements};
    parameters.add(range.size() * page->element_size);
    if (page->home.tier() == Tier::Host) held += page->home.size();
    if (page->home.tier() == Tier::Nvme) {
      held_nvme += pager::Tiers::nvme_bytes(page->home.size());
    }
    if (largest == nullptr || page->bytes() > largest->bytes()) largest = page;
  }
  for (const auto& page : trained_) {
    gradients.add(page->gradient_bytes());
    const Optimizer& rule = groups_[page->parameters[0].group];
    for (const optim::TrainedParameter& parameter : page->parameters) {
      PAGODA_REQUIRE_EQ(groups_[parameter.group].index(), rule.index(),
                        "parameters that share the storage '{}' need one kind of optimizer",
                        page->page->name);
    }
    states.add(updater_->layout(*page, rule).bytes(page->updated.size()));
    check_gradient_staging(*page);
  }
  const device::ArenaStats arena = tiers_->arena().stats();
  if (largest != nullptr && largest->bytes() > arena.capacity) {
    throw UserError(fmt::format(
        "the parameter '{}' alone takes {}, and the device budget has {} for pages; raise "
        "device_budget",
        largest->name, format_bytes(largest->bytes()), format_bytes(arena.capacity)));
  }
  std::vector<Need> needs = {parameters, gradients, states};
  if (const Need in_wait = gradients_in_wait(pages, alone()); in_wait.bytes > 0) {
    needs.push_back(in_wait);
  }
  fit(needs, {arena.capacity, arena.capacity},
      {tiers_->budget(Tier::Host).limit(), tiers_->budget(Tier::Host).available() + held},
      {tiers_->budget(Tier::Nvme).limit(), tiers_->budget(Tier::Nvme).available() + held_nvme},
      tiers_->swap() != nullptr);
  for (const auto& [need, tag] : {std::pair{&gradients, pager::tag::kGradients},
                                  std::pair{&states, pager::tag::kOptimizer}}) {
    const bool on_host =
        need->placement != PagerPlacement::Nvme && need->placement != PagerPlacement::Device;
    if (on_host) tiers_->host().expect(tag, need->blocks);
  }
}

void Runtime::check_gradient_staging(const TrainedPage& page) const {
  PAGODA_REQUIRE_LE(page.page->bytes(), tiers_->gradient_staging(),
                    "the gradient of '{}' ({}) does not fit into the part of the device budget "
                    "that gradients may take ({}); raise device_budget or gradient_staging",
                    page.page->name, format_bytes(page.page->bytes()),
                    format_bytes(tiers_->gradient_staging()));
}

void Runtime::check_equal_on_all_ranks(const std::vector<Page*>& pages) {
  struct Sum {
    std::uint64_t elements;
    std::uint64_t contents;
  };
  std::vector<Sum> mine;
  std::vector<std::byte> buffer(config_.staging);
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

void Runtime::place(const std::vector<Page*>& pages) {
  const PagerPlacement wanted = pager_placement(config_.parameters);
  if (config_.zero == 3 && !alone()) {
    for (Page* page : pages) pager_->set_home_range(*page, pager_->shard_of(*page), wanted);
    return;
  }
  Bytes all = 0;
  for (const Page* page : pages) all += align_up(page->bytes(), 512);
  const bool fits = all <= tiers_->arena().stats().capacity;
  PAGODA_REQUIRE(fits || wanted != PagerPlacement::Device,
                 "parameters on the device need {} and the device budget has {} for pages; raise "
                 "device_budget or place them on the host",
                 format_bytes(all), format_bytes(tiers_->arena().stats().capacity));
  if (wanted != PagerPlacement::Device && !(wanted == PagerPlacement::Auto && fits)) return;
  for (Page* page : pages) pager_->evict(*page);
  for (Page* page : pages) pager_->fix(*page);
}

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
// Runtime::attach(): does it fit, is it equal on all ranks, and where does everything go.
#include <algorithm>
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
  Bytes bytes;
  PagerPlacement placement;
};

/// Fills the tiers from the top, as allocation will; throws where something stays over.
void fit(const std::vector<Need>& needs, Bytes device, Bytes host, Bytes nvme, bool has_nvme) {
  const Bytes device_budget = device;
  const Bytes host_budget = host;
  const Bytes nvme_budget = nvme;
  std::string list;
  Bytes missing_device = 0;
  Bytes missing_host = 0;
  Bytes missing_nvme = 0;
  for (const Need& need : needs) {
    list += fmt::format("{}{} {} ({})", list.empty() ? "" : ", ", need.state,
                        format_bytes(need.bytes), pager::name(need.placement));
    Bytes rest = need.bytes;
    if (need.placement == PagerPlacement::Device) {
      const Bytes here = std::min(rest, device);
      device -= here;
      missing_device += rest - here;
      continue;
    }
    if (need.placement != PagerPlacement::Nvme) {
      const Bytes here = std::min(rest, host);
      host -= here;
      rest -= here;
    }
    const Bytes there = has_nvme ? std::min(rest, nvme) : 0;
    nvme -= there;
    rest -= there;
    (has_nvme ? missing_nvme : missing_host) += rest;
  }
  if (missing_device == 0 && missing_host == 0 && missing_nvme == 0) return;
  const std::string help =
      missing_device > 0
          ? fmt::format("raise device_budget by {} or place some of them on the host",
                        format_bytes(missing_device))
      : missing_host > 0
          ? fmt::format("raise host_budget to {} or set nvme to a directory",
                        format_bytes(host_budget + missing_host))
          : fmt::format("raise nvme_budget to {} or host_budget by {}",
                        format_bytes(nvme_budget + missing_nvme), format_bytes(missing_nvme));
  throw UserError(fmt::format(
      "the model's states do not fit: {}; free are {} on the device, {} on the host{}; {}", list,
      format_bytes(device_budget), format_bytes(host_budget),
      has_nvme ? fmt::format(" and {} on NVMe", format_bytes(nvme_budget)) : "", help));
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
      page->reduced = pager_->slice_of(*spec.page);
      page->updated = config_.zero == 0 ? Range{0, spec.page->elements} : page->reduced;
      page->gradient_range = page->updated;
      trained_.push_back(std::move(page));
    }
    pages_ = pages;
    std::vector<TrainedPage*> order;  // gradients come last parameter first, until more is known
    for (auto page = trained_.rbegin(); page != trained_.rend(); ++page) {
      order.push_back(page->get());
    }
    reducer_->set_order(std::move(order));  // takes its buffers before states fill the host
    {
      const auto lock = pager_->lock();
      for (Page* page : pages_) page->attached = true;
    }
    check_fit(pages);
    if (!alone()) check_equal_on_all_ranks(pages);
    place(pages);
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
    if (!alone()) control_->barrier();  // from here on others may pull
  } catch (const UserError&) {
    forget_trained();
    if (!alone()) fail(std::current_exception());  // the others wait for this rank
    throw;
  } catch (...) {
    forget_trained();
    fail_and_throw();
  }
}

void Runtime::forget_trained() {
  reducer_->set_order({});
  for (const auto& page : trained_) updater_->remove(*page);
  trained_.clear();
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
  Bytes parameters = 0;
  Bytes held_host = 0;  // homes that pages have now and that count as free
  Bytes held_nvme = 0;
  const Page* largest = nullptr;
  for (const Page* page : pages) {
    const Range range = config_.zero == 3 ? pager_->slice_of(*page) : Range{0, page->elements};
    parameters += range.size() * page->element_size;
    if (page->home.tier() == Tier::Host) held_host += page->home.size();
    if (page->home.tier() == Tier::Nvme) held_nvme += page->home.size();
    if (largest == nullptr || page->bytes() > largest->bytes()) largest = page;
  }
  Bytes gradients = 0;
  Bytes states = 0;
  for (const auto& page : trained_) {
    gradients += page->gradient_bytes();
    const Optimizer& rule = groups_[page->parameters[0].group];
    for (const optim::TrainedParameter& parameter : page->parameters) {
      PAGODA_REQUIRE_EQ(groups_[parameter.group].index(), rule.index(),
                        "parameters that share the storage '{}' need one kind of optimizer",
                        page->page->name);
    }
    states += updater_->layout(*page, rule).bytes(page->updated.size());
    PAGODA_REQUIRE_LE(page->page->bytes(), tiers_->gradient_staging(),
                      "the gradient of '{}' ({}) does not fit into the part of the device budget "
                      "that gradients may take ({}); raise device_budget or gradient_staging",
                      page->page->name, format_bytes(page->page->bytes()),
                      format_bytes(tiers_->gradient_staging()));
  }
  const device::ArenaStats arena = tiers_->arena().stats();
  if (largest != nullptr && largest->bytes() > arena.capacity) {
    throw UserError(fmt::format(
        "the parameter '{}' alone takes {}, and the device budget has {} for pages; raise "
        "device_budget",
        largest->name, format_bytes(largest->bytes()), format_bytes(arena.capacity)));
  }
  fit({{"parameters", parameters, pager_placement(config_.parameters)},
       {"gradients", gradients, pager_placement(config_.gradients)},
       {"optimizer", states, pager_placement(config_.optimizer)}},
      arena.capacity, tiers_->budget(Tier::Host).available() + held_host,
      tiers_->budget(Tier::Nvme).available() + held_nvme, tiers_->swap() != nullptr);
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
    for (Page* page : pages) pager_->set_home_range(*page, pager_->slice_of(*page), wanted);
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

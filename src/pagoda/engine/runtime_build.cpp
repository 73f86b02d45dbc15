// SPDX-License-Identifier: Apache-2.0
// How a Runtime is put together.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "pagoda/engine/agreement.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/host_buffers.h"
#include "pagoda/engine/runtime.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using pager::Tier;

/// Threads that update beside the updater's own. Where the model runs on a device, up to two cores
/// are nobody's: a thread that launches its operators and waits for a core lets the device wait,
/// too, and one that adds a gradient or brings a page keeps operators waiting.
unsigned spare_cores(device::DeviceKind kind) {
  const unsigned cores = std::max(2U, std::thread::hardware_concurrency());
  return cores - (kind == device::DeviceKind::Host ? 1U : std::clamp(cores / 5, 1U, 3U));
}

}  // namespace

void Runtime::build() {
  config_.validate();
  const auto on_failure = [this](std::exception_ptr error) { fail(std::move(error)); };
  device_ = make_device(config_);
  tiers_ = make_tiers(config_, device_, ranks());
  Reservation left_free;
  if (config_.activation_reserve > 0) {
    left_free =
        tiers_->budget(Tier::Host).reserve(config_.activation_reserve, "activation_reserve");
  }
  const HostBuffers buffers(config_, device_->kind(), ranks());
  const Bytes host_budget = tiers_->budget(Tier::Host).limit();
  staging_ = buffers.staging(host_budget);
  pager::Pager::Options pages;
  pages.fetch_threads = config_.fetch_threads;
  pages.staging = staging_;
  pages.least_lookup = device_->reads_pinned_memory() ? config_.lookup_in_place : 0;
  pages.rank = rank();
  pages.sharding = {ranks()};
  pages.own_step = std::chrono::duration<double>(config_.timeout);
  pages.dropped_wait = config_.dropped_wait;
  if (!config_.pin_advice.empty()) pages.pin_advice = config_.pin_advice;
  pager_ = std::make_unique<pager::Pager>(*tiers_, pages);
  failure_.listen([this](const auto&, const std::string& why) { pager_->refuse(why); });
  oracle_ = std::make_unique<prefetch::Oracle>();
  if (config_.prefetch) pager_->set_foresight(oracle_.get());

  pool_ = std::make_unique<ThreadPool>(
      config_.update_threads != 0 ? config_.update_threads : spare_cores(device_->kind()),
      "update");
  optim::Updater::Options updates;
  updates.master16 = config_.master == Master::Split ? optim::StateLayout::Master::Split
                                                     : optim::StateLayout::Master::Whole;
  updates.moments =
      config_.moments == MomentType::Bf16 ? kernels::Dtype::BF16 : kernels::Dtype::F32;
  updates.chunk = buffers.update_elements(host_budget);
  updates.buffers = buffers.update_buffers(host_budget);
  updates.seed = config_.seed;
  updates.on_failure = on_failure;
  updater_ = std::make_unique<optim::Updater>(*pager_, *pool_, updates);
  failure_.listen([this](const auto& error, const auto&) { updater_->fail(error); });
  pager_->set_pending_updates(updater_.get());
  placer_ = std::make_unique<StatePlacer>(config_, *pager_, *updater_, rules_, ranks());

  optim::Gradients::Options sums;
  sums.scale = config_.reduction == Reduction::Sum ? 1.0F : 1.0F / static_cast<float>(ranks());
  sums.squares = config_.takes_norm();
  sums.staging = staging_;
  gradients_ = std::make_unique<optim::Gradients>(*tiers_, *pool_, sums);
  gather_ = std::make_unique<GradientGather>(*gradients_, *pager_);

  if (!alone()) connect();
  early_ = std::make_unique<EarlyUpdates>(*pager_, *updater_, early_mode(config_),
                                          [this](TrainedPage& page) {
                                            TrainedPage* const one = &page;
                                            if (config_.zero == 0 && !alone()) {
                                              gather_->gather({&one, 1}, *ranks_.gradients());
                                              page.gathered = true;
                                            }
                                          });
  updater_->set_callbacks(
      [this](TrainedPage& page, std::uint64_t version) {
        return shards_ == nullptr || shards_->shard_updated(page, version);
      },
      [this](Page& page) {
        if (early_->in_window()) early_->require_may_write(*trained(page));
        if (shards_ != nullptr) shards_->wait_for_other_ranks(page);
        check();
      },
      [this](Page& page) {
        early_->wait_for_update(*trained(page));
        if (shards_ != nullptr) shards_->wait_for_other_ranks(page);
        check();
      });
  frozen_ = std::make_unique<FrozenParameters>(FrozenParameters::Options{
      [this](std::span<TrainedPage* const> pages) { thawing_->take_homes(pages); },
      [this](std::span<TrainedPage* const> pages) { thawing_->drop_homes(pages); },
      [this](TrainedPage& page) { updater_->add(page, rules_.at_attach(page)); }});
  model_ = std::make_unique<AttachedModel>(*frozen_);
  calls_ = std::make_unique<Calls>(
      Calls::Parts{owner_, rules_, ranks_, *pager_, *model_, *early_,
                   [this](Collective mine) { return reducer_->meet(std::move(mine)); }});
  Reducer::Options rounds;
  rounds.bucket = config_.bucket;
  rounds.device_limit = tiers_->gradient_staging();
  rounds.on_failure = on_failure;
  rounds.in_backward = [this] { return calls_->in(Call::Backward); };
  reducer_ =
      std::make_unique<Reducer>(Reducer::Groups{ranks_.calls(), ranks_.gradients()}, *pager_,
                                *gradients_, *updater_, *early_, *frozen_, std::move(rounds));
  failure_.listen([this](const auto& error, const auto&) { reducer_->fail(error); });
  thawing_ = std::make_unique<Thawing>(ranks_, *model_, *frozen_, *placer_, *reducer_, *gradients_,
                                       *updater_);
  attacher_ = std::make_unique<Attacher>(
      Attacher::Parts{config_, rules_, ranks_, *pager_, *updater_, *placer_, shards_.get(), *early_,
                      *reducer_, *gather_, *model_},
      std::move(left_free));
  stepper_ =
      std::make_unique<Stepper>(Stepper::Parts{config_, rules_, ranks_, *pager_, *updater_, *early_,
                                               *reducer_, *gather_, *thawing_, *model_});
}

/// What ranks have beside what one rank has: groups, and shards that others ask for.
void Runtime::connect() {
  ranks_.connect(config_.timeout, config_.join_timeout);
  ShardExchange::Options shards;
  shards.rank = rank();
  shards.whole_pages = config_.zero == 1 || config_.zero == 2;
  shards.staging = staging_;
  shards.on_failure = [this](std::exception_ptr error) { fail(std::move(error)); };
  shards.on_end = [this](const std::string& reason) { pulls_ended(reason); };
  shards_ = std::make_unique<ShardExchange>(ranks_.world().make_group("pulls"), *pager_, *updater_,
                                            std::move(shards));
  failure_.listen([this](const auto&, const auto& why) { shards_->fail(why); });
  pager_->set_remote(shards_.get());
}

void Runtime::watch_others() {
  Ranks::Watching watching;
  watching.timeout = config_.timeout;
  watching.heartbeat = config_.beat();
  watching.activity = [this] {
    const pager::PagerStats pages = pager_->stats();
    return pages.touches + pages.lookups + pages.device_to_host + reducer_->stats().contributions +
           updater_->stats().pages;
  };
  watching.in_backward = [this] { return calls_->where_in(Call::Backward); };
  ranks_.watch(std::move(watching));
}

/// A rank that waits less long than another one's signs of life are apart would take it for dead.
void Runtime::require_same_patience() {
  Settings mine;
  for (const char* key : {"timeout", "heartbeat"}) mine.add(key, config_.get(key));
  try {
    ranks_.require_equal(mine);
  } catch (const Diverged&) {
    throw;
  } catch (...) {  // another rank was not made, and has said why
    failure_.fail_and_throw();
  }
}

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/runtime.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <malloc.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/host_need.h"
#include "pagoda/io/checksum.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using pager::Placement;
using pager::Range;
using pager::Tier;

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

/// What is told to other ranks and to later calls: the message without its source location.
std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    std::string out = e.message();
    for (const ErrorContext& item : e.contexts()) {
      out += fmt::format(" [{}={}]", item.key, item.value);
    }
    return out;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

/// Threads that update beside the updater's own. Where the model runs on a device, up to two cores
/// are nobody's: a thread that launches its operators and waits for a core lets the device wait,
/// too, and one that adds a gradient or brings a page keeps operators waiting.
unsigned spare_cores(device::DeviceKind kind) {
  const unsigned cores = std::max(2U, std::thread::hardware_concurrency());
  return cores - (kind == device::DeviceKind::Host ? 1U : std::clamp(cores / 5, 1U, 3U));
}

optim::LossScale::Options loss_scale_options(const Config& config) {
  optim::LossScale::Options options;
  if (config.loss_scale.kind == LossScale::Kind::None) return options;
  options.dynamic = config.loss_scale.kind == LossScale::Kind::Dynamic;
  options.initial = options.dynamic ? config.loss_scale_initial : config.loss_scale.value;
  options.smallest = config.loss_scale_minimum;
  options.window = config.loss_scale_window;
  return options;
}

}  // namespace

Runtime::Runtime(const Config& config, std::shared_ptr<comm::World> world)
    : config_(config),
      world_(std::move(world)),
      scale_(loss_scale_options(config)),
      trace_(config.trace, config.trace_steps, world_->rank(), world_->size()) {
  config_.validate();
  device_ = make_device(config_);
  tiers_ = make_tiers(config_, device_, world_->size());
  if (config_.activation_reserve > 0) {
    left_free_ =
        tiers_->budget(Tier::Host).reserve(config_.activation_reserve, "activation_reserve");
  }
  pager::Pager::Options pages;
  pages.fetch_threads = config_.fetch_threads;
  pages.staging = config_.staging;
  pages.least_lookup = device_->reads_pinned_memory() ? config_.lookup_in_place : 0;
  pages.rank = world_->rank();
  pages.sharding = {world_->size()};
  pages.dropped_wait = config_.dropped_wait;
  if (!config_.pin_advice.empty()) pages.pin_advice = config_.pin_advice;
  pager_ = std::make_unique<pager::Pager>(*tiers_, pages);
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
  updates.chunk = align_up(config_.update_chunk / sizeof(float), pager::Sharding::kBlock);
  updates.buffers = update_buffers(config_, device_->kind(), world_->size());
  updates.seed = config_.seed;
  updates.on_failure = [this](std::exception_ptr error) { fail(std::move(error)); };
  updater_ = std::make_unique<optim::Updater>(*pager_, *pool_, updates);
  pager_->set_debts(updater_.get());

  optim::Gradients::Options sums;
  sums.scale =
      config_.reduction == Reduction::Sum ? 1.0F : 1.0F / static_cast<float>(world_->size());
  sums.squares = config_.clip > 0 || scales_loss();
  sums.staging = config_.staging;
  gradients_ = std::make_unique<optim::Gradients>(*tiers_, *pool_, sums);

  number_ = world_->next_number();
  if (!alone()) {
    control_ = world_->make_group("control");
    reduce_group_ = world_->make_group("gradients");
    ShardExchange::Options shards;
    shards.rank = world_->rank();
    shards.whole_pages = config_.zero == 1 || config_.zero == 2;
    shards.staging = config_.staging;
    shards.on_failure = [this](std::exception_ptr error) { fail(std::move(error)); };
    shards.on_end = [this](const std::string& reason) { pulls_ended(reason); };
    shards_ = std::make_unique<ShardExchange>(world_->make_group("pulls"), *pager_, *updater_,
                                              std::move(shards));
    pager_->set_remote(shards_.get());
    updater_->set_callbacks(
        [this](TrainedPage& page, std::uint64_t version) {
          return shards_->part_updated(page, version);
        },
        [this](Page& page) {
          shards_->await_served(page);
          check();
        });
    comm::Watch::Options watch;
    watch.name = fmt::format("engine {}", number_);
    watch.timeout = std::chrono::duration_cast<decltype(watch.timeout)>(
        std::chrono::duration<double>(config_.timeout));
    watch.interval = std::chrono::duration_cast<decltype(watch.interval)>(
        std::chrono::duration<double>(config_.heartbeat));
    watch_ = std::make_unique<comm::Watch>(*world_, watch, [this](int, std::string reason) {
      fail(std::make_exception_ptr(EngineError(std::move(reason))));
    });
  }
  early_ =
      std::make_unique<EarlyUpdates>(*pager_, *updater_, early_mode(), [this](TrainedPage& page) {
        TrainedPage* const one = &page;
        if (config_.zero == 0 && !alone()) {
          gather_gradients({&one, 1}, *tiers_, pager_->sharding(), config_.bucket,
                           gradients_->scratch(), *reduce_group_);
        }
      });
  reducer_ = std::make_unique<Reducer>(
      reduce_group_.get(), *pager_, *gradients_, *updater_, *early_,
      Reducer::Options{config_.bucket, tiers_->gradient_staging(),
                       [this](std::exception_ptr error) { fail(std::move(error)); }});
}

Runtime::~Runtime() {
  // Whoever waits is woken, and nobody starts anything; then the threads end, users first.
  const auto ended = std::make_exception_ptr(EngineError("the engine has ended"));
  {
    const std::lock_guard lock(error_mutex_);
    ending_ = true;
    ended_.notify_all();
  }
  linger();
  {
    // Nobody tells anyone of a failure while those whom it would tell go, one by one.
    std::unique_lock lock(error_mutex_);
    closed_ = true;
    ended_.wait(lock, [&] { return failing_ == 0; });
  }
  if (watch_ != nullptr) watch_->leave();
  updater_->fail(ended);
  early_->fail();
  reducer_->fail(ended);
  pager_->refuse("the engine has ended");
  for (comm::Group* group : {control_.get(), reduce_group_.get()}) {
    if (group != nullptr) group->abort("the engine has ended");
  }
  if (shards_ != nullptr) shards_->fail("the engine has ended");
  watch_.reset();
  reducer_.reset();
  updater_->stop();  // before those whom it calls
  pager_->stop_fetching();
  shards_.reset();
  updater_.reset();
  pager_->set_debts(nullptr);
  pager_->set_foresight(nullptr);
  trained_.clear();
  pager_.reset();
}

void Runtime::linger() noexcept {
  if (alone() || failed()) return;
  constexpr auto kLook = std::chrono::milliseconds(2);
  Stopwatch watch;
  std::uint64_t served = shards_->stats().served;
  try {
    const auto key = [&](int rank) { return fmt::format("engine {} ends {}", number_, rank); };
    world_->put(key(world_->rank()), "1");
    for (int rank = 0; rank < world_->size(); ++rank) {
      while (!world_->get(key(rank)) && !failed() && watch.seconds() < config_.timeout) {
        std::this_thread::sleep_for(kLook);
        // Somebody still asks for what is here: as long as that lasts, this rank stays.
        if (shards_->stats().served != served) watch = {};
        served = shards_->stats().served;
      }
    }
  } catch (const std::exception& error) {  // the board is gone: so are the others
    log::debug("engine", "did not wait for the other ranks to end", {{"cause", error.what()}});
  }
}

void Runtime::check() const {
  owner_.require("an engine");
  if (!failed()) return;
  const std::lock_guard lock(error_mutex_);
  std::rethrow_exception(error_);
}

void Runtime::fail_and_throw() {
  fail(std::current_exception());
  check();
  throw;
}

/// What to say of a failure: where communication with another rank failed, that rank may know more.
std::exception_ptr Runtime::root_cause(std::exception_ptr error) noexcept {
  int peer = -1;
  try {
    std::rethrow_exception(error);
  } catch (const comm::PeerLost& lost) {
    peer = lost.rank();
  } catch (const comm::GroupAborted&) {  // why is known to somebody else
  } catch (...) {
    return error;
  }
  try {
    // A rank says why before it closes anything.
    std::vector<int> ranks;
    if (peer >= 0) ranks.push_back(peer);
    for (int rank = 0; rank < world_->size(); ++rank) {
      if (rank != world_->rank() && rank != peer) ranks.push_back(rank);
    }
    for (const int rank : ranks) {
      if (const auto why = world_->get(cause_key(rank))) {
        return std::make_exception_ptr(EngineError(fmt::format("rank {} failed: {}", rank, *why)));
      }
    }
  } catch (const std::exception&) {  // the board is gone, too
  }
  return error;
}

std::string Runtime::cause_key(int rank) const {
  return fmt::format("engine {} failed {}", number_, rank);
}

/// This rank can no longer answer the others. If that is because one of them is gone, whoever
/// notices which one says so; within the time that a silent rank is given.
void Runtime::pulls_ended(const std::string& reason) {
  std::unique_lock lock(error_mutex_);
  ended_.wait_for(lock, std::chrono::duration<double>(config_.timeout + 2 * config_.heartbeat),
                  [&] { return error_ != nullptr || ending_; });
  if (error_ != nullptr || ending_) return;
  lock.unlock();
  fail(std::make_exception_ptr(
      EngineError(fmt::format("pages can no longer be served: {}", reason))));
}

void Runtime::fail(std::exception_ptr error) noexcept {
  if (failed()) return;
  if (!alone()) error = root_cause(std::move(error));
  std::string why;
  log::Level level = log::Level::Error;
  {
    const std::lock_guard lock(error_mutex_);
    if (error_ != nullptr || closed_) return;
    ++failing_;
    if (ending_) level = log::Level::Debug;  // what was owed is dropped, on every rank
    error_ = error;
    why = message_of(error);
    failed_.store(true, std::memory_order_release);
    ended_.notify_all();
  }
  log::write(level, "engine", "stopped by an error", {{"cause", text_of(error)}});
  if (!alone()) {
    try {
      world_->put(cause_key(world_->rank()), why);
      if (watch_ != nullptr) watch_->fail(why);
    } catch (const std::exception&) {  // the board is gone, and the others know it
    }
  }
  pager_->refuse(why);
  updater_->fail(error);
  if (early_ != nullptr) early_->fail();
  if (reducer_ != nullptr) reducer_->fail(error);
  for (comm::Group* group : {control_.get(), reduce_group_.get()}) {
    if (group != nullptr) group->abort(why);
  }
  if (shards_ != nullptr) shards_->fail(why);
  const std::lock_guard lock(error_mutex_);
  --failing_;
  ended_.notify_all();
}

TrainedPage* Runtime::trained(const Page& page) noexcept {
  const auto found = std::find_if(trained_.begin(), trained_.end(),
                                  [&](const auto& trained) { return trained->page == &page; });
  return found == trained_.end() ? nullptr : found->get();
}

void Runtime::begin_backward(bool last) {
  check();
  early_->backward_begins(last, groups_);
  reducer_->begin(last);
}

void Runtime::contribute(Contribution contribution) {
  check();
  early_->gradient_comes(*contribution.page);
  reducer_->push(std::move(contribution));
}

void Runtime::end_backward() {
  early_->backward_ends(trained_);
  reducer_->end();
}

void Runtime::set_learning_rate(std::size_t group, double lr) {
  PAGODA_REQUIRE_LT(group, groups_.size(), "there is no such parameter group");
  if (optim::learning_rate(groups_[group]) == lr) return;
  early_->forbid("set_lr()");
  optim::set_learning_rate(groups_[group], lr);
}

void Runtime::set_optimizer(std::size_t group, const Optimizer& optimizer) {
  PAGODA_REQUIRE_LT(group, groups_.size(), "there is no such parameter group");
  PAGODA_REQUIRE(
      optim::name(optimizer) == optim::name(groups_[group]) &&
          optim::has_momentum(optimizer) == optim::has_momentum(groups_[group]),
      "another optimizer needs another state: release() the model and attach() it again");
  early_->forbid("a change of the optimizer's constants");
  groups_[group] = optimizer;
}

void Runtime::set_clip(double clip) {
  PAGODA_REQUIRE(trained_.empty(), "clip can be set before attach() only");
  Config changed = config_;
  changed.clip = clip;
  changed.validate();
  config_.clip = clip;
  gradients_->keep_squares(clip > 0 || scales_loss());
  early_->set_mode(early_mode());
}

EarlyUpdates::Mode Runtime::early_mode() const noexcept {
  using Mode = EarlyUpdates::Mode;
  if (!config_.early_updates || scales_loss()) return Mode::Never;
  if (config_.clip == 0) return Mode::Always;
  return config_.clip_ahead ? Mode::OnTrust : Mode::Never;
}

void Runtime::settle() {
  updater_->settle_all();
  if (shards_ != nullptr) shards_->settle();
  check();
}

void Runtime::finish() {
  check();
  try {
    settle();
    check_order();
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::barrier() {
  check();
  try {
    if (!alone()) control_->barrier();
  } catch (...) {
    fail_and_throw();
  }
}

/// All gradients are added up, over all ranks: their updates may begin here as well.
void Runtime::await_gradients() {
  early_->no_more_backward(groups_);
  reducer_->finish();
}

/// A violation on a thread that could not throw it is thrown here.
void Runtime::check_order() const {
  if (const auto& checker = device_->checker()) checker->check();
}

double Runtime::grad_norm() {
  check();
  try {
    await_gradients();
    for (const auto& page : trained_) {
      if (!page->filled() || !page->squares.empty() || page->reduced.empty()) continue;
      gradients_->measure(*page);
    }
    return gradient_norm(trained_, pager_->sharding(), control_.get()) / scale_.scale();
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::zero_grad() {
  check();
  early_->forbid("zero_grad()");
  try {
    await_gradients();
    for (const auto& page : trained_) optim::Gradients::clear(*page);
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::read_gradient(const Page& page, std::span<float> to) {
  check();
  const TrainedPage* trained = this->trained(page);
  PAGODA_REQUIRE(trained != nullptr, "page '{}' is not trained: it has no gradient", page.name);
  await_gradients();
  if (alone()) {
    gradients_->read(*trained, 0, to);
    return;
  }
  std::fill(to.begin(), to.end(), 0.0F);
  if (!trained->reduced.empty()) {
    gradients_->read(*trained, trained->reduced.begin,
                     to.subspan(trained->reduced.begin, trained->reduced.size()));
  }
  std::vector<std::span<std::byte>> parts;
  for (int rank = 0; rank < world_->size(); ++rank) {
    const Range range = pager_->sharding().of(page.elements, rank);
    parts.push_back(std::as_writable_bytes(to.subspan(range.begin, range.size())));
  }
  const auto own = std::as_bytes(to.subspan(trained->reduced.begin, trained->reduced.size()));
  control_->all_gather(own, parts);
}

Stats Runtime::stats() const {
  Stats out;
  out.steps = steps_;
  out.skipped_steps = scale_.skipped();
  out.pager = pager_->stats();
  out.updates = updater_->stats();
  out.gradients = reducer_->stats();
  if (shards_ != nullptr) {
    out.pulled = shards_->stats().bytes_pulled;
    out.served = shards_->stats().bytes_served;
  }
  const device::ArenaStats arena = tiers_->arena().stats();
  out.device_pages = arena.used;
  out.device_pages_peak = arena.peak;
  for (const Tier tier : {Tier::Device, Tier::Host, Tier::Nvme}) {
    const Budget& budget = tiers_->budget(tier);
    out.tiers[static_cast<std::size_t>(tier)] = {budget.limit(), budget.used(), budget.peak(),
                                                 budget.holders()};
  }
  if (reduce_group_ != nullptr) out.unbudgeted.group_buffers = reduce_group_->buffer_bytes();
  out.unbudgeted.free_heap = ::mallinfo2().fordblks;
  return out;
}

}  // namespace pagoda::engine

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
#include "pagoda/engine/user_writes.h"
#include "pagoda/io/checksum.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Page;
using pager::Placement;
using pager::Range;
using pager::Tier;

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
      ranks_(std::move(world)),
      scale_(loss_scale_options(config)),
      trace_(config.trace, config.trace_steps, rank(), ranks()) {
  try {
    build();
    if (!alone()) watch_others();
  } catch (...) {
    if (!alone()) {  // the others may be waiting for this rank to connect, or to say something
      const std::string why = message_of(std::current_exception());
      fail(std::current_exception(), log::Level::Debug);
      ranks_.give_up(why);
    }
    throw;
  }
}

void Runtime::build() {
  config_.validate();
  const auto on_failure = [this](std::exception_ptr error) { fail(std::move(error)); };
  device_ = make_device(config_);
  tiers_ = make_tiers(config_, device_, ranks());
  if (config_.activation_reserve > 0) {
    left_free_ =
        tiers_->budget(Tier::Host).reserve(config_.activation_reserve, "activation_reserve");
  }
  pager::Pager::Options pages;
  pages.fetch_threads = config_.fetch_threads;
  pages.staging = config_.staging;
  pages.least_lookup = device_->reads_pinned_memory() ? config_.lookup_in_place : 0;
  pages.rank = rank();
  pages.sharding = {ranks()};
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
  updates.chunk = align_up(config_.update_chunk / sizeof(float), pager::Sharding::kBlock);
  updates.buffers = update_buffers(config_, device_->kind(), ranks());
  updates.seed = config_.seed;
  updates.on_failure = on_failure;
  updater_ = std::make_unique<optim::Updater>(*pager_, *pool_, updates);
  failure_.listen([this](const auto& error, const auto&) { updater_->fail(error); });
  pager_->set_debts(updater_.get());
  placer_ = std::make_unique<StatePlacer>(config_, *pager_, *updater_, rules_, ranks());

  optim::Gradients::Options sums;
  sums.scale = config_.reduction == Reduction::Sum ? 1.0F : 1.0F / static_cast<float>(ranks());
  sums.squares = config_.clip > 0 || scales_loss();
  sums.staging = config_.staging;
  gradients_ = std::make_unique<optim::Gradients>(*tiers_, *pool_, sums);

  if (!alone()) connect();
  early_ =
      std::make_unique<EarlyUpdates>(*pager_, *updater_, early_mode(), [this](TrainedPage& page) {
        TrainedPage* const one = &page;
        if (config_.zero == 0 && !alone()) {
          gather_gradients({&one, 1}, *tiers_, pager_->sharding(), gather_buffer(),
                           *ranks_.gradients());
          page.gathered = true;
        }
      });
  updater_->set_callbacks(
      [this](TrainedPage& page, std::uint64_t version) {
        return shards_ == nullptr || shards_->part_updated(page, version);
      },
      [this](Page& page) {
        if (early_->in_window()) early_->require_may_write(*trained(page));
        if (shards_ != nullptr) shards_->await_served(page);
        check();
      },
      [this](Page& page) {
        if (shards_ != nullptr) shards_->await_served(page);
        check();
      });
  frozen_ = std::make_unique<FrozenParameters>(FrozenParameters::Options{
      [this](std::span<TrainedPage* const> pages) { take_homes_of_thawed(pages); },
      [this](std::span<TrainedPage* const> pages) { drop_homes_of_thawed(pages); },
      [this](TrainedPage& page) { updater_->add(page, rules_.at_attach(page)); }});
  Reducer::Options rounds;
  rounds.bucket = config_.bucket;
  rounds.device_limit = tiers_->gradient_staging();
  rounds.on_failure = on_failure;
  rounds.in_backward = [this] { return in_call(Call::Backward); };
  reducer_ =
      std::make_unique<Reducer>(Reducer::Groups{ranks_.calls(), ranks_.gradients()}, *pager_,
                                *gradients_, *updater_, *early_, *frozen_, std::move(rounds));
  failure_.listen([this](const auto& error, const auto&) { reducer_->fail(error); });
}

/// What ranks have beside what one rank has: groups, and shards that others ask for.
void Runtime::connect() {
  ranks_.connect(config_.timeout, config_.join_timeout);
  ShardExchange::Options shards;
  shards.rank = rank();
  shards.whole_pages = config_.zero == 1 || config_.zero == 2;
  shards.staging = config_.staging;
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
  watching.heartbeat = config_.heartbeat;
  watching.activity = [this] {
    const pager::PagerStats pages = pager_->stats();
    return pages.touches + pages.lookups + pages.device_to_host + reducer_->stats().contributions +
           updater_->stats().pages;
  };
  watching.in_backward = [this] { return where_in(Call::Backward); };
  watching.waited = [this] { return reducer_->waiting(); };
  ranks_.watch(std::move(watching));
}

Runtime::~Runtime() {
  // Whoever waits is woken, and nobody starts anything; then the threads end, users first.
  const auto ended = std::make_exception_ptr(EngineError("the engine has ended"));
  const bool cause = failure_.is_own();
  close();
  failure_.close();
  ranks_.end("the engine has ended");
  updater_->fail(ended);
  reducer_->fail(ended);
  pager_->refuse("the engine has ended");
  if (shards_ != nullptr) shards_->fail("the engine has ended");
  ranks_.stop_watching();
  reducer_.reset();
  updater_->stop();  // before those whom it calls
  pager_->stop_fetching();
  shards_.reset();
  updater_.reset();
  pager_->set_debts(nullptr);
  pager_->set_foresight(nullptr);
  trained_.clear();
  frozen_.reset();
  pager_.reset();
  ranks_.disconnect();
  // Their connections are closed: the others look at the board now, which may be in this process.
  if (cause && !alone()) {
    failure_.await_heard(
        std::chrono::duration<double>(std::min(config_.timeout, 2 * config_.heartbeat + 1)));
  }
}

std::string Runtime::close(const std::function<void()>& give_back) noexcept {
  failure_.ending();
  if (std::exchange(closed_, true)) return {};
  try {
    linger();
    give_back_together(give_back);
    return {};
  } catch (const std::exception& error) {  // the board may be gone: so are the others
    log::debug("engine", "did not wait for the other ranks to end", {{"cause", error.what()}});
    return message_of(std::current_exception());
  } catch (...) {
    return "unknown error";
  }
}

/// Other ranks may still read this one's shards: it stays until they have ended, too, or do nothing
/// any more.
void Runtime::linger() {
  failure_.check();
  if (alone()) return;
  constexpr auto kLook = std::chrono::milliseconds(2);
  const std::string where = where_in(Call::Close);
  ranks_.whereabouts().ends(where);
  failure_.post_end(where);
  reducer_->announce(in_call(Call::Close));
  while (!reducer_->met() && !failed() && !ranks_.others_idle()) std::this_thread::sleep_for(kLook);
  failure_.check();
  if (!reducer_->met()) throw EngineError("the other ranks are not in close()");
}

/// All ranks are in close(). Each copies for itself, and serves the others until they have, too.
void Runtime::give_back_together(const std::function<void()>& give_back) {
  std::uint64_t wanted = give_back ? 1 : 0;
  if (!alone()) ranks_.control()->all_reduce_max({&wanted, 1});
  if (wanted == 0) return;
  std::exception_ptr cause;
  try {
    settle();  // what early updates have computed was never seen, and is forgotten
    check_order();
    if (give_back) give_back();
  } catch (...) {
    cause = std::current_exception();
  }
  if (!alone()) ranks_.control()->all_reduce_max({&wanted, 1});
  if (cause != nullptr) std::rethrow_exception(cause);
}

void Runtime::check() const {
  owner_.require("an engine");
  failure_.check();
}

void Runtime::fail_and_throw() {
  fail(std::current_exception());
  check();
  throw;
}

/// This rank can no longer answer the others. If that is because one of them is gone, whoever
/// notices which one says so; within the time that a silent rank is given.
void Runtime::pulls_ended(const std::string& reason) {
  if (failure_.await(std::chrono::duration<double>(config_.timeout + 2 * config_.heartbeat)))
    return;
  fail(std::make_exception_ptr(
      EngineError(fmt::format("pages can no longer be served: {}", reason))));
}

std::string Runtime::where_in(Call call) const {
  Collective out;
  out.call = call;
  out.steps = ranks_.whereabouts().steps();
  return out.where();
}

Collective Runtime::in_call(Call call) const {
  Collective out;
  out.call = call;
  out.steps = ranks_.whereabouts().steps();
  out.rules = rules_.hash();
  if (!alone()) out.writes = UserWrites(*pager_, pages_).hash();
  return out;
}

Collective Runtime::meet(Collective mine) {
  check();
  const Call call = mine.call;
  if (call == Call::Step || call == Call::Join) early_->step_waits(rules_.now());
  try {
    ranks_met_ = reducer_->meet(std::move(mine));
    take_joined();
    return call_of_all(ranks_met_);
  } catch (...) {
    fail_and_throw();
  }
}

TrainedPage* Runtime::trained(const Page& page) noexcept {
  const auto found = std::find_if(trained_.begin(), trained_.end(),
                                  [&](const auto& trained) { return trained->page == &page; });
  return found == trained_.end() ? frozen_->find(page) : found->get();
}

void Runtime::begin_backward(bool last) {
  check();
  early_->backward_begins(last, rules_.now());
  reducer_->begin(last);
}

void Runtime::contribute(Contribution contribution) {
  check();
  if (contribution.late) {
    reducer_->end();  // a round that began without it has been agreed on without it
  } else {
    early_->gradient_comes(*contribution.page);
  }
  reducer_->push(std::move(contribution));
}

void Runtime::end_backward() {
  early_->backward_ends();
  reducer_->end();
}

void Runtime::backward_failed() {
  early_->backward_fails();
  reducer_->end();
}

pager::RawWrites Runtime::raw_writes(const Page& page) {
  const bool is_trained = std::any_of(trained_.begin(), trained_.end(),
                                      [&](const auto& one) { return one->page == &page; });
  return is_trained ? early_->raw_writes() : pager::RawWrites::Count;
}

void Runtime::check_raw_writes() {
  const std::vector<std::string> written = pager_->take_told_writes();
  if (written.empty()) return;
  early_->require_no_window(
      fmt::format("a write to parameter '{}' under engine.pin()", written[0]));
}

void Runtime::require_changeable(const std::string& what) {
  check();
  early_->require_no_window(what);
}

void Runtime::set_learning_rate(std::size_t group, double lr) {
  PAGODA_REQUIRE_LT(group, groups().size(), "there is no such parameter group");
  if (optim::learning_rate(groups()[group]) == lr) return;
  Optimizer changed = groups()[group];
  optim::set_learning_rate(changed, lr);
  optim::require_valid(changed);
  early_->require_no_window("set_lr()");
  rules_.set(group, changed);
}

void Runtime::set_optimizer(std::size_t group, const Optimizer& optimizer) {
  PAGODA_REQUIRE_LT(group, groups().size(), "there is no such parameter group");
  PAGODA_REQUIRE(
      optim::name(optimizer) == optim::name(groups()[group]) &&
          optim::has_momentum(optimizer) == optim::has_momentum(groups()[group]),
      "another optimizer needs another state: release() the model and attach() it again");
  optim::require_valid(optimizer);
  early_->require_no_window("a change of the optimizer's constants");
  rules_.set(group, optimizer);
}

void Runtime::set_clip(double clip) {
  PAGODA_REQUIRE(!attached(), "clip can be set before attach() only");
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
  if (config_.clip == 0) return Mode::Final;
  return config_.clip_ahead ? Mode::Reversible : Mode::Never;
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
    pager_->bind_fixed();
    check_order();
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::barrier() {
  const Whereabouts::Inside inside(ranks_.whereabouts(), where_in(Call::Barrier));
  meet(in_call(Call::Barrier));
}

void Runtime::begin_call(std::string label, const std::string& name, const std::string& argument) {
  label_ = std::move(label);
  Collective mine = in_call(Call::Barrier);
  mine.label = label_;
  in_their_call_ = std::make_unique<Whereabouts::Inside>(ranks_.whereabouts(), mine.where());
  meet(std::move(mine));
  if (alone()) return;
  try {
    if (!name.empty()) {
      Settings arguments;
      arguments.add(name, argument);
      arguments.require_equal(*ranks_.control());
    }
    require_same_writes(fmt::format("{}()", label_));
  } catch (const UserError&) {  // on all ranks, or the engine has failed
    in_their_call_.reset();
    throw;
  } catch (...) {
    fail_and_throw();
  }
}

/// `call` would take one rank's view of a parameter out of the engine: what the others have not
/// written must not be in it.
void Runtime::require_same_writes(std::string_view call) {
  if (alone()) return;
  try {
    if (!early_->in_window()) pager_->find_raw_writes();  // there step() finds or undoes them
    const UserWrites writes(*pager_, pages_);
    std::uint64_t any = writes.any() ? 1 : 0;
    ranks_.control()->all_reduce_max({&any, 1});
    if (any != 0) writes.require_same(*ranks_.control(), call);
  } catch (const WritesDiffer&) {
    throw;
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::end_call(const std::string& error) {
  const auto inside = std::exchange(in_their_call_, nullptr);
  Collective mine = in_call(Call::Barrier);
  mine.label = label_;
  meet(std::move(mine));
  try {
    all_or_none(ranks_.control(), [&] {
      if (!error.empty()) throw UserError(error);
    });
  } catch (const NoneDid& stopped) {  // this rank's caller has its own error
    if (error.empty()) std::rethrow_exception(stopped.error);
  } catch (...) {
    fail_and_throw();
  }
}

/// A violation on a thread that could not throw it is thrown here.
void Runtime::check_order() const {
  if (const auto& checker = device_->checker()) checker->check();
}

double Runtime::grad_norm() {
  check();
  early_->require_gradients("grad_norm()");
  const Whereabouts::Inside inside(ranks_.whereabouts(), where_in(Call::GradNorm));
  meet(in_call(Call::GradNorm));
  require_none_refused();
  return norm_together();
}

double Runtime::norm_together() {
  try {
    for (const auto& page : trained_) {
      if (!page->filled() || !page->squares.empty() || page->reduced.empty()) continue;
      gradients_->measure(*page);
    }
    const double norm =
        gradient_norm(trained_, pager_->sharding(), ranks_.control()) / scale_.scale();
    // Where no step needs them, nobody keeps the sums up to date with the next micro-batch.
    if (config_.clip == 0 && !scales_loss()) {
      for (const auto& page : trained_) page->squares.clear();
    }
    return norm;
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::zero_grad() {
  check();
  early_->require_no_window("zero_grad()");
  const Whereabouts::Inside inside(ranks_.whereabouts(), where_in(Call::ZeroGrad));
  meet(in_call(Call::ZeroGrad));
  clear_gradients();
}

void Runtime::clear_gradients() {
  try {
    for (const auto& page : trained_) optim::Gradients::clear(*page);
    frozen_->forget_refusal();
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::read_gradient(const Page& page, std::span<float> to) {
  check();
  const TrainedPage* trained = this->trained(page);
  PAGODA_REQUIRE(trained != nullptr, "page '{}' is not trained: it has no gradient", page.name());
  early_->require_gradients("grad()");
  Collective mine = in_call(Call::Grad);
  mine.detail = fmt::format("'{}'", page.name());
  mine.value = trained->number;
  const Whereabouts::Inside inside(ranks_.whereabouts(), mine.where());
  meet(std::move(mine));
  PAGODA_REQUIRE(
      trained->gradient,
      "parameter '{}' is frozen, or was not thawed before the last backward(): it has no "
      "gradient",
      page.name());
  gather_gradient(*trained, to);
}

/// `to` is empty where nobody looks: on a rank that has joined.
void Runtime::gather_gradient(const TrainedPage& trained, std::span<float> to) {
  if (alone()) {
    gradients_->read(trained, 0, to);
    return;
  }
  try {
    gather_values(trained, *gradients_, pager_->sharding(), gather_bytes_, to, *ranks_.control());
  } catch (...) {
    fail_and_throw();
  }
}

std::span<std::byte> Runtime::gather_buffer() noexcept {
  return gradients_->scratch().first(gather_bytes_);
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
  if (const comm::Group* group = ranks_.gradients()) {
    out.unbudgeted.group_buffers = group->buffer_bytes();
  }
  out.unbudgeted.free_heap = ::mallinfo2().fordblks;
  return out;
}

}  // namespace pagoda::engine

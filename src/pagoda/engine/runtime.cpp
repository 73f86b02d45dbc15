// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/runtime.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"
#include "pagoda/device/ordering_checker.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/host_need.h"
#include "pagoda/io/checksum.h"
#include "pagoda/kernels/gradient_norm.h"

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
      world_(std::move(world)),
      number_(world_->next_number()),
      failure_(*world_, name()),
      scale_(loss_scale_options(config)),
      trace_(config.trace, config.trace_steps, world_->rank(), world_->size()) {
  try {
    build();
    if (!alone()) watch_others();
  } catch (const std::exception& error) {
    if (!alone()) {  // the others may be waiting for this rank to connect, or to say something
      fail(std::current_exception(), log::Level::Debug);
      world_->give_up(error.what());
      comm::Watch::fail(*world_, name(), error.what());
    }
    throw;
  }
}

void Runtime::build() {
  config_.validate();
  const auto on_failure = [this](std::exception_ptr error) { fail(std::move(error)); };
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
  updates.buffers = update_buffers(config_, device_->kind(), world_->size());
  updates.seed = config_.seed;
  updates.on_failure = on_failure;
  updater_ = std::make_unique<optim::Updater>(*pager_, *pool_, updates);
  failure_.listen([this](const auto& error, const auto&) { updater_->fail(error); });
  pager_->set_debts(updater_.get());

  optim::Gradients::Options sums;
  sums.scale =
      config_.reduction == Reduction::Sum ? 1.0F : 1.0F / static_cast<float>(world_->size());
  sums.squares = config_.clip > 0 || scales_loss();
  sums.staging = config_.staging;
  gradients_ = std::make_unique<optim::Gradients>(*tiers_, *pool_, sums);

  if (!alone()) connect();
  early_ =
      std::make_unique<EarlyUpdates>(*pager_, *updater_, early_mode(), [this](TrainedPage& page) {
        TrainedPage* const one = &page;
        if (config_.zero == 0 && !alone()) {
          gather_gradients({&one, 1}, *tiers_, pager_->sharding(), config_.bucket, *reduce_group_);
          page.gathered = true;
        }
      });
  updater_->set_callbacks(
      [this](TrainedPage& page, std::uint64_t version) {
        return shards_ == nullptr || shards_->part_updated(page, version);
      },
      [this](Page& page) {
        early_->require_no_window(fmt::format("an in-place write to parameter '{}'", page.name));
        if (shards_ != nullptr) shards_->await_served(page);
        check();
      });
  Reducer::Options rounds;
  rounds.bucket = config_.bucket;
  rounds.device_limit = tiers_->gradient_staging();
  rounds.on_failure = on_failure;
  rounds.in_backward = [this] { return in_call(Call::Backward); };
  reducer_ = std::make_unique<Reducer>(Reducer::Groups{calls_group_.get(), reduce_group_.get()},
                                       *pager_, *gradients_, *updater_, *early_, std::move(rounds));
  failure_.listen([this](const auto& error, const auto&) { reducer_->fail(error); });
}

/// What ranks have beside what one rank has: groups, and shards that others ask for.
void Runtime::connect() {
  for (auto& [group, name] : {std::pair(&calls_group_, "calls"), std::pair(&control_, "control"),
                              std::pair(&reduce_group_, "gradients")}) {
    *group = world_->make_group(name);
    failure_.listen([made = group->get()](const auto&, const auto& why) { made->abort(why); });
  }
  ShardExchange::Options shards;
  shards.rank = world_->rank();
  shards.whole_pages = config_.zero == 1 || config_.zero == 2;
  shards.staging = config_.staging;
  shards.on_failure = [this](std::exception_ptr error) { fail(std::move(error)); };
  shards.on_end = [this](const std::string& reason) { pulls_ended(reason); };
  shards_ = std::make_unique<ShardExchange>(world_->make_group("pulls"), *pager_, *updater_,
                                            std::move(shards));
  failure_.listen([this](const auto&, const auto& why) { shards_->fail(why); });
  pager_->set_remote(shards_.get());
}

void Runtime::watch_others() {
  const auto milliseconds = [](double seconds) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::duration<double>(seconds));
  };
  comm::Watch::Options watch;
  watch.name = name();
  watch.timeout = milliseconds(config_.timeout);
  watch.interval = milliseconds(config_.heartbeat);
  watch.note = [this] {
    return whereabouts_.note([this] {
      const pager::PagerStats pages = pager_->stats();
      return pages.touches + pages.lookups + pages.device_to_host +
             reducer_->stats().contributions + updater_->stats().pages;
    });
  };
  watch.on_notes = [this](std::span<const comm::PeerNote> notes) { look_at_others(notes); };
  watch_ = std::make_unique<comm::Watch>(*world_, watch, [this](int rank, std::string reason) {
    fail(std::make_exception_ptr(RankFailed(failure_.story_of(rank, std::move(reason)))));
  });
  failure_.listen([this](const auto&, const auto& why) { watch_->fail(why); });
}

Runtime::~Runtime() {
  // Whoever waits is woken, and nobody starts anything; then the threads end, users first.
  const auto ended = std::make_exception_ptr(EngineError("the engine has ended"));
  failure_.ending();
  const bool cause = failure_.is_own();
  linger();
  failure_.close();
  if (watch_ != nullptr) watch_->leave();
  updater_->fail(ended);
  reducer_->fail(ended);
  pager_->refuse("the engine has ended");
  for (comm::Group* group : {calls_group_.get(), control_.get(), reduce_group_.get()}) {
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
  calls_group_.reset();
  control_.reset();
  reduce_group_.reset();
  // Their connections are closed: the others look at the board now, which may be in this process.
  if (cause && !alone()) {
    failure_.await_heard(
        std::chrono::duration<double>(std::min(config_.timeout, 2 * config_.heartbeat + 1)));
  }
}

/// Other ranks may still read this one's shards: it stays until they have ended, too, or do nothing
/// any more.
void Runtime::linger() noexcept {
  if (alone() || failed()) return;
  constexpr auto kLook = std::chrono::milliseconds(2);
  try {
    const std::string where = in_call(Call::Close).where();
    whereabouts_.ends(where);
    failure_.post_end(where);
    reducer_->announce(in_call(Call::Close));
    while (!reducer_->met() && !failed() && !others_idle_.load())
      std::this_thread::sleep_for(kLook);
  } catch (const std::exception& error) {  // the board is gone: so are the others
    log::debug("engine", "did not wait for the other ranks to end", {{"cause", error.what()}});
  }
}

/// On the watch's thread.
void Runtime::look_at_others(std::span<const comm::PeerNote> notes) {
  const Nanos timeout =
      std::chrono::nanoseconds(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::duration<double>(config_.timeout)))
          .count();
  others_idle_.store(Whereabouts::all_idle(notes, timeout));
  const auto idle = Whereabouts::idle_peer(
      notes, whereabouts_.in_call().value_or(in_call(Call::Backward).where()), rank(),
      reducer_->waiting(), timeout);
  if (idle) fail(std::make_exception_ptr(Diverged(*idle)));
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

Collective Runtime::in_call(Call call) const {
  Collective out;
  out.call = call;
  out.steps = whereabouts_.steps();
  out.rules = rules_.load(std::memory_order_relaxed);
  return out;
}

Collective Runtime::meet(Collective mine) {
  check();
  const Call call = mine.call;
  if (call == Call::Step || call == Call::Join) early_->step_waits(groups_);
  try {
    ranks_met_ = reducer_->meet(std::move(mine));
    return call_of_all(ranks_met_);
  } catch (...) {
    fail_and_throw();
  }
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
  early_->backward_ends();
  reducer_->end();
}

void Runtime::set_learning_rate(std::size_t group, double lr) {
  PAGODA_REQUIRE_LT(group, groups_.size(), "there is no such parameter group");
  if (optim::learning_rate(groups_[group]) == lr) return;
  Optimizer changed = groups_[group];
  optim::set_learning_rate(changed, lr);
  optim::require_valid(changed);
  early_->require_no_window("set_lr()");
  groups_[group] = changed;
  rules_.store(hash_of(groups_), std::memory_order_relaxed);
}

void Runtime::set_optimizer(std::size_t group, const Optimizer& optimizer) {
  PAGODA_REQUIRE_LT(group, groups_.size(), "there is no such parameter group");
  PAGODA_REQUIRE(
      optim::name(optimizer) == optim::name(groups_[group]) &&
          optim::has_momentum(optimizer) == optim::has_momentum(groups_[group]),
      "another optimizer needs another state: release() the model and attach() it again");
  optim::require_valid(optimizer);
  early_->require_no_window("a change of the optimizer's constants");
  groups_[group] = optimizer;
  rules_.store(hash_of(groups_), std::memory_order_relaxed);
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
  const Whereabouts::Inside inside(whereabouts_, in_call(Call::Barrier).where());
  meet(in_call(Call::Barrier));
}

void Runtime::begin_call(std::string label) {
  label_ = std::move(label);
  Collective mine = in_call(Call::Barrier);
  mine.label = label_;
  in_their_call_ = std::make_unique<Whereabouts::Inside>(whereabouts_, mine.where());
  meet(std::move(mine));
}

void Runtime::end_call(const std::string& error) {
  const auto inside = std::exchange(in_their_call_, nullptr);
  Collective mine = in_call(Call::Barrier);
  mine.label = label_;
  meet(std::move(mine));
  try {
    all_or_none(control_.get(), [&] {
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
  const Whereabouts::Inside inside(whereabouts_, in_call(Call::GradNorm).where());
  meet(in_call(Call::GradNorm));
  return norm_together();
}

double Runtime::norm_together() {
  try {
    for (const auto& page : trained_) {
      if (!page->filled() || !page->squares.empty() || page->reduced.empty()) continue;
      std::vector<float> values(page->reduced.size());
      gradients_->read(*page, page->reduced.begin, values);
      page->squares.resize(kernels::norm_blocks(values.size()));
      kernels::block_sums_of_squares(values.data(), values.size(), 1, page->squares, *pool_);
    }
    const double norm =
        gradient_norm(trained_, pager_->sharding(), control_.get()) / scale_.scale();
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
  const Whereabouts::Inside inside(whereabouts_, in_call(Call::ZeroGrad).where());
  meet(in_call(Call::ZeroGrad));
  clear_gradients();
}

void Runtime::clear_gradients() {
  try {
    for (const auto& page : trained_) optim::Gradients::clear(*page);
  } catch (...) {
    fail_and_throw();
  }
}

void Runtime::read_gradient(const Page& page, std::span<float> to) {
  check();
  const TrainedPage* trained = this->trained(page);
  PAGODA_REQUIRE(trained != nullptr, "page '{}' is not trained: it has no gradient", page.name);
  early_->require_gradients("grad()");
  Collective mine = in_call(Call::Grad);
  mine.detail = fmt::format("'{}'", page.name);
  mine.value = trained->number;
  const Whereabouts::Inside inside(whereabouts_, mine.where());
  meet(std::move(mine));
  gather_gradient(*trained, to);
}

void Runtime::gather_gradient(const TrainedPage& trained, std::span<float> to) {
  if (alone()) {
    gradients_->read(trained, 0, to);
    return;
  }
  try {
    std::fill(to.begin(), to.end(), 0.0F);
    if (!trained.reduced.empty()) {
      gradients_->read(trained, trained.reduced.begin,
                       to.subspan(trained.reduced.begin, trained.reduced.size()));
    }
    std::vector<std::span<std::byte>> parts;
    for (int rank = 0; rank < world_->size(); ++rank) {
      const Range range = pager_->sharding().of(trained.elements(), rank);
      parts.push_back(std::as_writable_bytes(to.subspan(range.begin, range.size())));
    }
    const auto own = std::as_bytes(to.subspan(trained.reduced.begin, trained.reduced.size()));
    control_->all_gather(own, parts);
  } catch (...) {
    fail_and_throw();
  }
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
  return out;
}

}  // namespace pagoda::engine

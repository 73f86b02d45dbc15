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
#include "pagoda/engine/agreement.h"
#include "pagoda/engine/backend.h"
#include "pagoda/engine/user_writes.h"

namespace pagoda::engine {

using optim::TrainedPage;
using pager::Page;
using pager::Tier;

Runtime::Runtime(const Config& config, std::shared_ptr<comm::World> world)
    : config_(config), ranks_(std::move(world)) {
  try {
    build();
    if (!alone()) {
      watch_others();
      require_same_patience();
    }
  } catch (...) {
    if (!alone()) {  // the others may be waiting for this rank to connect, or to say something
      fail(std::current_exception(), log::Level::Debug);
      ranks_.give_up(std::current_exception());
      failure_.close();        // nobody tells the watch of a failure any more…
      ranks_.stop_watching();  // …whose thread looks at what goes now
    }
    throw;
  }
}

void Runtime::end_waits() noexcept {
  constexpr const char* kEnded = "the engine has ended";
  const auto ended = std::make_exception_ptr(EngineError(kEnded));
  close();
  failure_.close();
  ranks_.end(kEnded);
  updater_->fail(ended);
  reducer_->fail(ended);
  pager_->refuse(kEnded);
  if (shards_ != nullptr) shards_->fail(kEnded);
}

Runtime::~Runtime() {
  // Whoever waits is woken, and nobody starts anything; then the threads end, users first.
  const bool cause = failure_.is_own();
  end_waits();
  ranks_.stop_watching();
  reducer_.reset();
  updater_->stop();  // before those whom it calls
  pager_->stop_fetching();
  shards_.reset();
  updater_.reset();
  pager_->set_pending_updates(nullptr);
  pager_->set_foresight(nullptr);
  model_.reset();
  frozen_.reset();
  pager_.reset();
  ranks_.disconnect();
  // Their connections are closed: the others look at the board now, which may be in this process.
  if (cause && !alone()) {
    failure_.wait_until_heard(
        std::chrono::duration<double>(std::min(config_.timeout, 2 * config_.beat() + 1)));
  }
}

std::string Runtime::close(const std::function<void()>& give_back) noexcept {
  failure_.ending();
  if (std::exchange(closed_, true)) return {};
  try {
    wait_for_others_to_close();
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
/// any more for as long as `timeout` says.
void Runtime::wait_for_others_to_close() {
  failure_.check();
  if (alone()) return;
  constexpr auto kLook = std::chrono::milliseconds(2);
  const std::string where = calls_->where_in(Call::Close);
  ranks_.status().ends(where);
  failure_.post_end(where);
  reducer_->announce(calls_->in(Call::Close));
  using Others = RankStatus::Others;
  const Stopwatch watch;
  const auto in_vain = [&] {
    const Others others = ranks_.others();
    const double waited = static_cast<double>(watch.elapsed_ns()) / 1e9;
    return others == Others::Gone || (others == Others::Idle && waited >= config_.timeout);
  };
  while (!reducer_->met() && !failed() && !in_vain()) std::this_thread::sleep_for(kLook);
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
    wait_for_updates();  // what early updates have computed was never seen, and is forgotten
    check_order();
    if (give_back) give_back();
  } catch (...) {
    cause = std::current_exception();
  }
  if (!alone()) ranks_.control()->all_reduce_max({&wanted, 1});
  if (cause != nullptr) std::rethrow_exception(cause);
}

void Runtime::check() const {
  require_here();
  failure_.check();
}

Nanos Runtime::waited_for_ranks() const noexcept {
  return std::max(ranks_.waited(), shards_ != nullptr ? shards_->waited() : 0);
}

/// This rank can no longer answer the others. If that is because one of them is gone, whoever
/// notices which one says so: well before ranks that wait for an answer are taken for idle.
void Runtime::pulls_ended(const std::string& reason) {
  if (failure_.wait(std::chrono::duration<double>(config_.timeout / 2))) return;
  fail(std::make_exception_ptr(
      EngineError(fmt::format("pages can no longer be served: {}", reason))));
}

std::vector<Page*> Runtime::attach(const std::vector<Page*>& pages, std::vector<TrainedSpec> specs,
                                   std::vector<Optimizer> groups, std::vector<FrozenSpec> frozen) {
  return attach([&] {
    return ModelSpec{pages, std::move(specs), std::move(groups), {}, std::move(frozen)};
  });
}

std::vector<Page*> Runtime::attach(const std::function<ModelSpec()>& describe,
                                   const std::function<void()>& watch) {
  check();
  PAGODA_REQUIRE(model_->empty(), "a model is attached already: release() it first");
  PAGODA_TRACE("engine", "attach");
  const RankStatus::InCall inside(ranks_.status(), calls_->where_in(Call::Attach));
  calls_->meet(calls_->in(Call::Attach));
  std::vector<Page*> overwritten = attacher_->attach(describe, watch);
  stepper_->trace_next();
  return overwritten;
}

void Runtime::finish_together(const std::function<void()>& work) {
  try {
    work();
    std::uint64_t done = 1;
    if (!alone()) ranks_.control()->all_reduce_max({&done, 1});
  } catch (...) {
    failure_.fail_and_throw();
  }
}

void Runtime::release(const std::function<void()>& copy) {
  const RankStatus::InCall inside(ranks_.status(), calls_->where_in(Call::Release));
  calls_->meet(calls_->in(Call::Release));
  try {
    wait_for_updates();  // what early updates have computed was never seen, and is forgotten
    check_order();
    calls_->require_same_writes("release()");
    // Nobody forgets anything before all have what they need of it.
    all_or_none(ranks_.control(), copy);
    attacher_->detach();
  } catch (const NoneDid& stopped) {  // none has changed anything
    std::rethrow_exception(stopped.error);
  } catch (const UserError&) {  // updates have begun, or writes differ, on all ranks
    throw;
  } catch (...) {
    failure_.fail_and_throw();
  }
}

void Runtime::drop(Page& page) {
  if (shards_ != nullptr) shards_->unshare(page);
  pager_->drop(page);
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

void Runtime::backward_failed(bool over) {
  early_->backward_fails(over);
  reducer_->end();
}

pager::RawWrites Runtime::raw_writes(const Page& page) {
  return model_->trains(page) ? early_->raw_writes() : pager::RawWrites::Count;
}

void Runtime::check_raw_writes() {
  const std::vector<std::string> written = pager_->take_reported_writes();
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
  PAGODA_REQUIRE(model_->empty(), "clip can be set before attach() only");
  Config changed = config_;
  changed.clip = clip;
  changed.validate();
  config_.clip = clip;
  gradients_->keep_squares(config_.takes_norm());
  early_->set_mode(early_mode(config_));
}

StepResult Runtime::step(const std::function<void(Page&)>& bumped) {
  check();
  check_raw_writes();
  const RankStatus::InCall inside(ranks_.status(), calls_->where_in(Call::Step));
  calls_->meet(calls_->in(Call::Step));
  const StepResult result = stepper_->step(calls_->met(), false, bumped);
  stepper_->trace_next();
  return result;
}

void Runtime::join(const std::function<void(Page&)>& bumped) {
  const RankStatus::InCall inside(ranks_.status(), calls_->where_in(Call::Join));
  for (;;) {
    const Collective all = calls_->meet(calls_->in(Call::Join));
    if (calls_->refused_by_any()) {  // the others' call, and theirs to act upon
      try {
        calls_->throw_refusal(nullptr);
      } catch (const UserError&) {
        check();
      }
      continue;
    }
    switch (all.call) {
      case Call::ZeroGrad:
        clear_gradients();
        break;
      case Call::GradNorm:
        if (frozen_->refusal().empty()) (void)stepper_->norm();
        break;
      case Call::Grad: {
        const auto trained = model_->trained();
        const auto page = std::find_if(trained.begin(), trained.end(),
                                       [&](const auto& one) { return one->number == all.value; });
        if (page == trained.end()) break;  // frozen: the others say so
        gather_gradient(**page, {});
        break;
      }
      default:  // step(), or all have joined: what came since the last step is used
        try {
          stepper_->step(calls_->met(), true, bumped);
        } catch (const StepRefused& refused) {  // the others' to act upon: they come back to it
          log::warn("engine", "a step of the others was refused", {{"cause", refused.message()}});
          break;
        }
        stepper_->trace_next();
        if (all.call == Call::Join) return;
    }
  }
}

void Runtime::wait_for_updates() {
  updater_->wait_for_all();
  if (shards_ != nullptr) shards_->wait_for_completion();
  check();
}

void Runtime::finish() {
  check();
  try {
    wait_for_updates();
    pager_->bind_fixed();
    check_order();
  } catch (...) {
    failure_.fail_and_throw();
  }
}

void Runtime::barrier() {
  const RankStatus::InCall inside(ranks_.status(), calls_->where_in(Call::Barrier));
  calls_->meet(calls_->in(Call::Barrier));
}

/// A violation on a thread that could not throw it is thrown here.
void Runtime::check_order() const {
  if (const auto& checker = device_->checker()) checker->check();
}

double Runtime::grad_norm() {
  check();
  const RankStatus::InCall inside(ranks_.status(), calls_->where_in(Call::GradNorm));
  calls_->meet_unless_refused(calls_->in(Call::GradNorm),
                              [&] { early_->require_gradients("grad_norm()"); });
  require_none_refused();
  return stepper_->norm();
}

void Runtime::require_none_refused() const {
  if (!frozen_->refusal().empty()) throw ThawRefused(frozen_->refusal());
}

void Runtime::zero_grad() {
  check();
  const RankStatus::InCall inside(ranks_.status(), calls_->where_in(Call::ZeroGrad));
  calls_->meet_unless_refused(calls_->in(Call::ZeroGrad),
                              [&] { early_->require_no_window("zero_grad()"); });
  clear_gradients();
}

void Runtime::clear_gradients() {
  try {
    for (const auto& page : model_->trained()) optim::Gradients::clear(*page);
    frozen_->forget_refusal();
  } catch (...) {
    failure_.fail_and_throw();
  }
}

void Runtime::read_gradient(const Page& page, std::span<float> to) {
  check();
  const TrainedPage* trained = this->trained(page);
  PAGODA_REQUIRE(trained != nullptr, "page '{}' is not trained: it has no gradient", page.name());
  Collective mine = calls_->in(Call::Grad);
  mine.detail = fmt::format("'{}'", page.name());
  mine.value = trained->number;
  const RankStatus::InCall inside(ranks_.status(), mine.where());
  calls_->meet_unless_refused(std::move(mine), [&] { early_->require_gradients("grad()"); });
  PAGODA_REQUIRE(trained->gradient,
                 "parameter '{}' is frozen, or was not thawed before the last backward(): "
                 "it has no gradient",
                 page.name());
  gather_gradient(*trained, to);
}

/// `to` is empty where nobody looks: on a rank that has joined.
void Runtime::gather_gradient(const TrainedPage& trained, std::span<float> to) {
  if (alone()) {
    gather_->read(trained, to, nullptr);
    return;
  }
  try {
    gather_->read(trained, to, ranks_.control());
  } catch (...) {
    failure_.fail_and_throw();
  }
}

Stats Runtime::stats() const {
  Stats out;
  out.steps = stepper_->steps();
  out.skipped_steps = stepper_->skipped();
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

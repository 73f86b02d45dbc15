// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/thread_pool.h"
#include "pagoda/comm/world.h"
#include "pagoda/engine/attached_model.h"
#include "pagoda/engine/attacher.h"
#include "pagoda/engine/calls.h"
#include "pagoda/engine/collective.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/engine/frozen_parameters.h"
#include "pagoda/engine/gradient_gather.h"
#include "pagoda/engine/model_spec.h"
#include "pagoda/engine/ranks.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/engine/rules.h"
#include "pagoda/engine/shard_exchange.h"
#include "pagoda/engine/state_placer.h"
#include "pagoda/engine/stats.h"
#include "pagoda/engine/stepper.h"
#include "pagoda/engine/thawing.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/optim/gradients.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"
#include "pagoda/prefetch/oracle.h"

namespace pagoda::engine {

/// One rank's engine without torch: tiers, pages, gradients and updates put together. It makes the
/// parts, lets the ranks meet in each collective call, and hands the work on: Attacher and Stepper
/// do what their names say, Failure (of Ranks) keeps the first error.
///
/// `pagoda::Engine` (torch/engine.h) is what users see; it tells this of storages, gradients and
/// steps. attach(), step(), join(), barrier(), zero_grad(), grad_norm(), read_gradient() and
/// release() are collectives, of which every rank makes the same in the same order
/// (docs/notes/communication.md), and called by one thread; contribute() by the threads of
/// backward; the rest by any. After a failure everything throws its first error again.
class Runtime {
 public:
  Runtime(const Config& config, std::shared_ptr<comm::World> world);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  /// Starts no collective and does not throw: pending updates are dropped. Other ranks may still
  /// read this one's shards, so it waits for them to end, too, unless something has failed.
  ~Runtime();

  const Config& config() const noexcept { return config_; }
  pager::Pager& pager() noexcept { return *pager_; }
  pager::Tiers& tiers() noexcept { return *tiers_; }
  optim::Updater& updater() noexcept { return *updater_; }
  device::Device& device() noexcept { return *device_; }
  int rank() const noexcept { return ranks_.rank(); }
  int ranks() const noexcept { return ranks_.size(); }

  /// The pages of the model, trained or not, get the homes that the configuration says, and trained
  /// ones gradients and state; all ranks start with rank 0's values. `describe` makes the pages,
  /// `watch` does what the caller needs of the attached model: it comes last. A UserError, or
  /// memory that ran out, of this or of another rank, leaves the engine without a model, and
  /// usable. Returns the pages whose values are others now.
  std::vector<pager::Page*> attach(const std::function<ModelSpec()>& describe,
                                   const std::function<void()>& watch = {});
  std::vector<pager::Page*> attach(const std::vector<pager::Page*>& pages,
                                   std::vector<TrainedSpec> trained, std::vector<Optimizer> groups,
                                   std::vector<FrozenSpec> frozen = {});
  /// Whether there is a model.
  bool attached() const noexcept { return !model_->empty(); }
  /// After an attach() that failed on all ranks, or a release(): does `work`, which throws nothing
  /// that another rank need not hear of, and returns when all ranks have.
  void finish_together(const std::function<void()>& work);
  /// Forgets gradients and states, once all ranks have done `copy` with every update made; those
  /// pages of which a rank has a shard stay, for others may need them, until drop(). What `copy`
  /// throws, here or on another rank, leaves everything as it is. StepRefused as in step().
  void release(const std::function<void()>& copy);
  /// The page is nobody's any more, on any rank: after release().
  void drop(pager::Page& page);
  /// The form of a page that is given to the optimizer, trained or frozen; null for others.
  optim::TrainedPage* trained(const pager::Page& page) noexcept { return model_->find(page); }

  /// Which of the model's `frozen` parameters, by their place there, require a gradient now: told
  /// before the gradients of a micro-batch come and before step(), which throws ThawRefused where
  /// they cannot be trained (docs/notes/thaw.md). Leaves out those that is_trained() says.
  void set_thawed(const FrozenSet& now) { frozen_->set_thawed(now); }
  bool can_be_trained(std::size_t frozen) const { return (*frozen_)[frozen].obstacle.empty(); }
  /// Whether it has been thawed, and step() has agreed to that. Between two steps.
  bool is_trained(std::size_t frozen) const {
    return (*frozen_)[frozen].state == FrozenParameters::State::Trained;
  }

  /// A micro-batch's backward pass. `last`: of its step, so that updates may begin. contribute()
  /// without a begin belongs to one that is not known to be the last.
  void begin_backward(bool last);
  void contribute(Contribution contribution);
  void end_backward();
  /// The pass ended with an error: the gradients that came are a micro-batch. `over`: no others of
  /// it can come; if none has, a single rank goes on as if the pass had not begun.
  void backward_failed(bool over = true);

  /// What becomes of writes by raw pointers to a page that is held from now on, and what they do to
  /// the step: a UserError where they were undone.
  pager::RawWrites raw_writes(const pager::Page& page);
  void check_raw_writes();

  /// The step: `bumped` is called for every page that has a pending update from now on.
  StepResult step(const std::function<void(pager::Page&)>& bumped);
  /// Takes part in the other ranks' steps with nothing of its own, until all have joined.
  void join(const std::function<void(pager::Page&)>& bumped);
  /// Returns when no update is pending.
  void finish();
  /// Returns when every rank has called it.
  void barrier();
  /// A collective call of somebody else's begins, on all ranks, and ends. Where ranks have another
  /// `argument` for what is called `name`, or have written other things to a parameter since the
  /// last step(), all throw UserError, and it has not begun. What this rank met in it (empty:
  /// nothing) is thrown on all the others at its end; the engine lives.
  void begin_call(std::string label, const std::string& name = {},
                  const std::string& argument = {}) {
    calls_->begin(std::move(label), name, argument);
  }
  void end_call(const std::string& error) { calls_->end(error); }
  /// Around what this rank does by itself, under the name `label`, while others may wait for it: it
  /// is not idle, however long that takes. Meets nobody.
  void begin_work(std::string label) { calls_->begin_work(std::move(label)); }
  void end_work() { calls_->end_work(); }
  /// Drops the gradients accumulated so far, on this rank; all ranks do it at the same point.
  void zero_grad();

  const std::vector<Optimizer>& groups() const noexcept { return rules_.now(); }
  /// UserError where `what`, which changes the step to come, must wait for step().
  void require_changeable(const std::string& what);
  void set_learning_rate(std::size_t group, double lr);
  /// Other constants of the group's rule: it stays the same rule with the same state.
  void set_optimizer(std::size_t group, const Optimizer& optimizer);
  /// Before attach(): what the configuration says of clipping.
  void set_clip(double clip);
  double loss_scale() const noexcept { return stepper_->loss_scale(); }
  /// Of the gradients accumulated so far. A collective.
  double grad_norm();
  /// Elements of the accumulated gradient, wherever they are. All ranks are between two steps.
  void read_gradient(const pager::Page& page, std::span<float> to);

  /// The user is done with the engine, and something of it that is still in use may keep it: the
  /// other ranks need not wait for that. Returns when they are done, too. The destructor does it.
  /// `give_back` copies what the user shall keep, with every update applied, while all ranks still
  /// serve their shards. Returns why it could not, or nothing.
  std::string close(const std::function<void()>& give_back = {}) noexcept;
  /// close(), and whoever waits for a page, an update or another rank is told that the engine has
  /// ended. The destructor does it, unless somebody must have been woken before.
  void end_waits() noexcept;
  /// Whether this is the process that made it, and not a fork of it: there it may only be leaked.
  bool here() const noexcept { return owner_.here(); }
  /// Throws in a forked process, without a look at anything that it would have to lock.
  void require_here() const { owner_.require("an engine"); }
  /// Throws the first error, if there was one; in a forked process, that it belongs to another.
  void check() const;
  bool failed() const noexcept { return failure_.failed(); }
  /// For how long this rank has waited for others: in a call, for gradients or for shards; 0: it
  /// does not. Any thread.
  Nanos waited_for_ranks() const noexcept;
  /// The engine cannot go on: latches the first error, tells everyone who waits and every rank.
  void fail(std::exception_ptr error, log::Level level = log::Level::Error) noexcept {
    failure_.fail(std::move(error), level);
  }

  Stats stats() const;

 private:
  void build();
  void connect();
  void watch_others();
  void require_same_patience();
  void require_none_refused() const;
  void clear_gradients();
  void gather_gradient(const optim::TrainedPage& page, std::span<float> to);
  void wait_for_updates();
  void check_order() const;
  void wait_for_others_to_close();
  void give_back_together(const std::function<void()>& give_back);
  void pulls_ended(const std::string& reason);
  bool alone() const noexcept { return ranks_.alone(); }

  const io::OwnerProcess owner_;
  Config config_;
  Bytes staging_ = 0;  // of each staging buffer
  Rules rules_;
  Ranks ranks_;
  Failure& failure_ = ranks_.failure();
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<pager::Tiers> tiers_;
  std::unique_ptr<prefetch::Oracle> oracle_;
  std::unique_ptr<pager::Pager> pager_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<optim::Gradients> gradients_;
  std::unique_ptr<GradientGather> gather_;
  std::unique_ptr<optim::Updater> updater_;
  std::unique_ptr<StatePlacer> placer_;
  std::unique_ptr<ShardExchange> shards_;
  std::unique_ptr<EarlyUpdates> early_;
  std::unique_ptr<FrozenParameters> frozen_;
  std::unique_ptr<AttachedModel> model_;
  std::unique_ptr<Calls> calls_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<Thawing> thawing_;
  std::unique_ptr<Attacher> attacher_;
  std::unique_ptr<Stepper> stepper_;

  bool closed_ = false;

  const Failure::Closing closing_{failure_};  // last: nobody is told of a failure while these go
};

}  // namespace pagoda::engine

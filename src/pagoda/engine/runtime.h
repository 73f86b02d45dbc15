// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pagoda/base/thread_pool.h"
#include "pagoda/comm/watch.h"
#include "pagoda/comm/world.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/engine/fit.h"
#include "pagoda/engine/reducer.h"
#include "pagoda/engine/shard_exchange.h"
#include "pagoda/engine/stats.h"
#include "pagoda/engine/step_trace.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/optim/gradients.h"
#include "pagoda/optim/loss_scale.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"
#include "pagoda/prefetch/oracle.h"

namespace pagoda::engine {

/// What step() did.
struct StepResult {
  std::uint64_t step = 0;      // of those that were not skipped, from 1
  bool skipped = false;        // gradients were not finite: nothing changed but the loss scale
  std::optional<double> norm;  // of all gradients before clipping, where it was needed
  double loss_scale = 1;       // of the next step
};

/// A page to be trained, as the model describes it.
struct TrainedSpec {
  pager::Page* page = nullptr;
  kernels::Dtype dtype = kernels::Dtype::F32;
  std::vector<optim::Segment> segments;
  std::vector<optim::TrainedParameter> parameters;
};

/// One rank's engine without torch: tiers, pages, gradients and updates put together.
///
/// `pagoda::Engine` (torch/engine.h) is what users see; it tells this of storages, gradients and
/// steps. attach(), step(), join() and finish() are collectives and called by one thread;
/// contribute() by the threads of backward; the rest by any. After the first error everything
/// throws it again.
class Runtime {
 public:
  Runtime(const Config& config, std::shared_ptr<comm::World> world);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  /// Starts no collective and does not throw: what is still owed is dropped. Other ranks may still
  /// read this one's shards, so it waits for them to end, too, unless something has failed.
  ~Runtime();

  const Config& config() const noexcept { return config_; }
  pager::Pager& pager() noexcept { return *pager_; }
  pager::Tiers& tiers() noexcept { return *tiers_; }
  device::Device& device() noexcept { return *device_; }
  int rank() const noexcept { return world_->rank(); }
  int ranks() const noexcept { return world_->size(); }

  /// The pages of the model, trained or not, get the homes that the configuration says, and trained
  /// ones gradients and state. UserError before anything is moved if they do not fit.
  void attach(const std::vector<pager::Page*>& pages, std::vector<TrainedSpec> trained,
              std::vector<Optimizer> groups);
  /// Forgets gradients and states; pages stay. Nothing is owed.
  void detach();
  /// The trained form of a page; null for others.
  optim::TrainedPage* trained(const pager::Page& page) noexcept;

  /// A micro-batch's backward pass. `last`: of its step, so that updates may begin. contribute()
  /// without a begin belongs to one that is not known to be the last.
  void begin_backward(bool last);
  void contribute(Contribution contribution);
  void end_backward();

  /// The step: `version_of` is told of every page that owes an update from now on.
  StepResult step(const std::function<void(pager::Page&)>& bumped);
  /// Takes part in the other ranks' steps with nothing of its own, until all have joined.
  void join(const std::function<void(pager::Page&)>& bumped);
  /// Returns when nothing is owed.
  void finish();
  /// Returns when every rank has called it.
  void barrier();
  /// Drops the gradients accumulated so far, on this rank; all ranks do it at the same point.
  void zero_grad();

  const std::vector<Optimizer>& groups() const noexcept { return groups_; }
  void set_learning_rate(std::size_t group, double lr);
  /// Other constants of the group's rule: it stays the same rule with the same state.
  void set_optimizer(std::size_t group, const Optimizer& optimizer);
  /// Before attach(): what the configuration says of clipping.
  void set_clip(double clip);
  double loss_scale() const noexcept { return scale_.scale(); }
  /// Of the gradients accumulated so far. A collective.
  double grad_norm();
  /// Elements of the accumulated gradient, wherever they are. All ranks are between two steps.
  void read_gradient(const pager::Page& page, std::span<float> to);

  /// Whether this is the process that made it, and not a fork of it: there it may only be leaked.
  bool here() const noexcept { return owner_.here(); }
  /// Throws the first error, if there was one; in a forked process, that it belongs to another.
  void check() const;
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// The engine cannot go on: latches the first error, tells everyone who waits and every rank.
  void fail(std::exception_ptr error) noexcept;

  Stats stats() const;

 private:
  Fit plan_fit(const std::vector<pager::Page*>& pages, Bytes buffers);
  void check_equal_on_all_ranks(const std::vector<pager::Page*>& pages);
  void place(const std::vector<pager::Page*>& pages, const Fit& fit);
  void make_room_to_undo();
  void forget_trained();
  StepResult step_together(bool leaving, bool& all_leaving,
                           const std::function<void(pager::Page&)>& bumped);
  void settle();
  void await_gradients();
  void check_order() const;
  void linger() noexcept;
  [[noreturn]] void fail_and_throw();
  std::exception_ptr root_cause(std::exception_ptr error) noexcept;
  std::string cause_key(int rank) const;
  void pulls_ended(const std::string& reason);
  void publish_writes(bool shards);
  void agree_on_order();
  std::vector<optim::TrainedPage*> update_order(std::vector<optim::TrainedPage*> pages);
  bool scales_loss() const noexcept { return config_.loss_scale.kind != LossScale::Kind::None; }
  bool alone() const noexcept { return world_->size() == 1; }
  EarlyUpdates::Mode early_mode() const noexcept;
  std::vector<optim::TrainedPage*> give_up_early(std::span<optim::TrainedPage* const> pages);

  const io::OwnerProcess owner_;
  Config config_;
  std::shared_ptr<comm::World> world_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<comm::Group> control_;
  std::unique_ptr<comm::Group> reduce_group_;
  std::unique_ptr<pager::Tiers> tiers_;
  Reservation left_free_;  // by the states: activation_reserve, until they are placed
  std::unique_ptr<prefetch::Oracle> oracle_;
  std::unique_ptr<pager::Pager> pager_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<optim::Gradients> gradients_;
  std::unique_ptr<optim::Updater> updater_;
  std::unique_ptr<EarlyUpdates> early_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<ShardExchange> shards_;
  std::unique_ptr<comm::Watch> watch_;

  std::vector<pager::Page*> pages_;                           // of attached models
  std::vector<std::unique_ptr<optim::TrainedPage>> trained_;  // by number
  Reservation norms_;  // of the sums of squares that trained_ have
  std::vector<Optimizer> groups_;
  optim::LossScale scale_;
  StepTrace trace_;
  std::uint64_t steps_ = 0;
  unsigned number_ = 0;  // of this engine, among those of its world

  std::atomic<bool> failed_{false};
  mutable std::mutex error_mutex_;
  std::condition_variable ended_;
  std::exception_ptr error_;  // guarded by error_mutex_
  bool ending_ = false;       // guarded by error_mutex_: the destructor runs
  bool closed_ = false;       // guarded by error_mutex_: …and what fails is nobody's concern
  int failing_ = 0;           // guarded by error_mutex_: calls of fail() that tell the others
};

}  // namespace pagoda::engine

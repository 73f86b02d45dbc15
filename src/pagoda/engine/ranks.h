// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "pagoda/base/clock.h"
#include "pagoda/comm/group.h"
#include "pagoda/comm/watch.h"
#include "pagoda/comm/world.h"
#include "pagoda/engine/agreement.h"
#include "pagoda/engine/failure.h"
#include "pagoda/engine/rank_status.h"

namespace pagoda::engine {

/// One engine's rank among the others: the groups in which they talk, each used by one thread at a
/// time and in the same order on all ranks, and the watch that notices who is gone or idle
/// (docs/notes/communication.md). A rank that is alone has neither.
class Ranks {
 public:
  explicit Ranks(std::shared_ptr<comm::World> world);

  comm::World& world() noexcept { return *world_; }
  int rank() const noexcept { return world_->rank(); }
  int size() const noexcept { return world_->size(); }
  bool alone() const noexcept { return size() == 1; }
  /// Of this engine on the board, the same on all ranks and never used twice.
  std::string name() const { return fmt::format("engine {}", number_); }

  /// Why this rank's engine cannot go on, for all of its threads and all ranks.
  Failure& failure() noexcept { return failure_; }

  /// Makes the groups. A failure ends what waits in them.
  void connect(double timeout, double join_timeout);
  comm::Group* calls() noexcept { return calls_.get(); }  ///< where collective calls are announced
  comm::Group* control() noexcept { return control_.get(); }      ///< of the thread that trains
  comm::Group* gradients() noexcept { return gradients_.get(); }  ///< of the reducer's thread
  const comm::Group* gradients() const noexcept { return gradients_.get(); }

  struct Watching {
    double timeout = 0;
    double heartbeat = 0;
    /// Counts what this rank has done for itself.
    RankStatus::Activity activity;
    /// Where this rank is when it is in no call.
    std::function<std::string()> in_backward;
  };
  /// From now on a rank that is gone or idle is a failure.
  void watch(Watching watching);
  RankStatus& status() noexcept { return status_; }
  const RankStatus& status() const noexcept { return status_; }
  /// For how long this rank has waited for others in one of its groups; 0: it does not. Any thread,
  /// between connect() and disconnect().
  Nanos waited() const noexcept;
  /// As the watch has seen it last.
  RankStatus::Others others() const noexcept { return others_.load(); }

  /// Ends the join that connect() began; UserError on all ranks if they differ in these.
  void require_equal(const Settings& settings);
  /// This rank's engine was not made: the others may be waiting for it to connect.
  void give_up(const std::exception_ptr& error);
  /// The engine ends: nobody is watched, and what waits in the groups throws.
  void end(const std::string& why);
  void stop_watching() { watch_.reset(); }
  /// Closes the groups' connections.
  void disconnect();

 private:
  void look_at_others(std::span<const comm::PeerNote> notes);

  const std::shared_ptr<comm::World> world_;
  const unsigned number_;  // of this engine, among those of its world
  Failure failure_;        // before every thread that may fail, and after it
  RankStatus status_;
  std::atomic<RankStatus::Others> others_{RankStatus::Others::Busy};
  std::unique_ptr<comm::Group> calls_;
  std::unique_ptr<comm::Group> control_;
  std::unique_ptr<comm::Group> gradients_;
  Watching watching_;
  std::unique_ptr<comm::Watch> watch_;  // last: its thread uses the above
};

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "pagoda/base/clock.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/watch.h"

namespace pagoda::engine {

/// Where one rank is: in a call of the engine or outside of it, and whether it does anything
/// ("Slow, idle, dead" in docs/notes/communication.md). It travels with the rank's heartbeats.
///
/// All members may be called from any thread, note() by the watch's only.
class RankStatus {
 public:
  /// Counts what this rank has done for itself: grows while operators use its pages.
  using Activity = std::function<std::uint64_t()>;

  /// While it lives, the rank is in a collective call, made by this thread: "in step() 5". It is
  /// not idle, for the others are in it, too.
  class InCall {
   public:
    InCall(RankStatus& owner, std::string where) : owner_(owner) { owner.enter(std::move(where)); }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;
    ~InCall() { owner_.leave(); }

   private:
    RankStatus& owner_;
  };

  /// The thread that trains is this one, until another makes a call.
  RankStatus();

  /// The rank ends: it is there for good.
  void ends(std::string where);
  /// Of steps taken.
  void stepped(std::uint64_t steps) noexcept { steps_.store(steps, std::memory_order_relaxed); }
  std::uint64_t steps() const noexcept { return steps_.load(std::memory_order_relaxed); }

  /// "in step() 5", "outside of the engine, after step() 4".
  std::string text() const;
  /// The same where it is in a call.
  std::optional<std::string> in_call() const;
  /// For the board: changes while the rank does something. By the watch's thread only.
  std::string note(const Activity& activity);

  /// Why this rank need not wait any longer: another is idle. `waited`: how long it has waited for
  /// others.
  static std::optional<std::string> idle_peer(std::span<const comm::PeerNote> peers,
                                              const std::string& here, int rank, Nanos waited,
                                              Nanos timeout);
  /// What the other ranks do, for one that waits for them to end.
  enum class Others : std::uint8_t {
    Busy,     ///< some work
    Closing,  ///< all are in close(), too
    Idle,     ///< some are alive, outside of the engine, and have done nothing for `timeout`
    Gone,     ///< some have left, and none works
  };
  static Others others(std::span<const comm::PeerNote> peers, Nanos timeout);

 private:
  enum class Place : char { Outside = 'o', Inside = 'i', Ended = 'e' };

  void enter(std::string where);
  void leave();
  void here();
  bool thread_computes();

  mutable RankedMutex<LockRank::RankStatus> mutex_;
  Place place_ = Place::Outside;    // guarded by mutex_
  std::string where_;               // guarded by mutex_: of the call
  std::optional<clockid_t> clock_;  // guarded by mutex_: of the thread that trains
  pid_t thread_ = 0;                // guarded by mutex_: that one
  std::atomic<std::uint64_t> steps_{0};

  // The watch's thread alone.
  std::uint64_t counted_ = 0;  // what `activity` said
  std::uint64_t active_ = 0;   // grows while the rank does something
  Nanos cpu_ = 0;              // of the thread that trains, at the last note
  Nanos looked_ = 0;           // when that was
};

}  // namespace pagoda::engine

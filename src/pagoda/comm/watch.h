// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "pagoda/base/clock.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/world.h"

namespace pagoda::comm {

/// What another rank has put on the board beside its heartbeat.
struct PeerNote {
  int rank = -1;
  std::string note;
  Nanos unchanged = 0;  ///< for how long it has been the same
  bool left = false;    ///< in good order: nobody misses it
};

/// Notices that another rank is gone, through the world's board: collectives need no time-out then,
/// and a slow rank is not a dead one. Each rank puts a growing number on the board; whose number
/// stands still is gone.
///
/// Every rank of the world has one. fail() and leave() may be called from any thread.
class Watch {
 public:
  struct Options {
    /// Between two looks.
    std::chrono::milliseconds interval{1000};
    /// A rank whose number has stood still this long is gone.
    std::chrono::milliseconds timeout{60'000};
    /// Tells the watches of one world apart.
    std::string name = "watch";
    /// What the others may know of this rank: put on the board with each beat. The watch's thread.
    std::function<std::string()> note = {};
    /// Told after each look what the others' notes are. The watch's thread; may not throw.
    std::function<void(std::span<const PeerNote>)> on_notes = {};
  };
  /// The rank that failed (-1: the board itself, held by none of them) and the whole story, as
  /// "rank 2 has not answered for 60 s (killed, or its machine is gone)" or "rank 1 failed: …".
  /// Called on the watch's thread, at most once: the first failure wins.
  using OnFailure = std::function<void(int rank, std::string reason)>;

  /// Begins to watch. `world` outlives it.
  Watch(World& world, Options options, OnFailure on_failure);
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  /// A rank that has neither left nor failed fails here: the others learn it without a time-out.
  ~Watch();

  /// Lets the others know that this rank has failed, at their next look. Not if they saw the cause
  /// themselves: after on_failure has been called this does nothing. Does not throw.
  void fail(std::string_view reason) noexcept;
  /// The same for a rank that never came to watch. Does not throw.
  static void fail(World& world, std::string_view name, std::string_view reason) noexcept;
  /// This rank ends in good order: it is not missed, and reports nothing any more.
  void leave() noexcept;

 private:
  struct Peer {
    int rank = -1;
    std::string last;  // what the board had at the last look
    Nanos changed = 0;
    bool left = false;
    std::string note;
    Nanos noted = 0;  // when its note changed
  };

  void run();
  /// Reads what the others put, and reports.
  void look();
  void report_notes();
  void report(int rank, std::string reason);
  void post(const std::string& value);
  void post_end(std::string value) noexcept;

  World& world_;
  const Options options_;
  const OnFailure on_failure_;
  std::vector<Peer> peers_;  // the thread's own
  std::uint64_t beats_ = 0;  // the thread's own

  RankedMutex<LockRank::WatchBoard>
      board_mutex_;     // held while this rank's value is put: the last word stays the last
  bool ended_ = false;  // guarded by board_mutex_: left or failed, no more beats

  RankedMutex<LockRank::Watch> mutex_;
  Condition wake_;
  bool stopping_ = false;  // guarded by mutex_
  bool silent_ = false;    // guarded by mutex_: reported already, or left
  std::thread thread_;     // last: uses all of the above
};

}  // namespace pagoda::comm

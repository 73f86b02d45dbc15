// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/world.h"

namespace pagoda::engine {

/// Another rank has failed. The message tells the whole story, with that rank's number.
class RankFailed : public EngineError {
 public:
  using EngineError::EngineError;
};

/// Ranks are in different calls, or have different settings. All of them meet the same error.
class Diverged : public UserError {
 public:
  using UserError::UserError;
};

/// What is told to other ranks and to later calls: the message without its place in our sources.
std::string message_of(const std::exception_ptr& error);
/// The same with the number of the rank that has met it, unless the message says whose it is.
std::string story_of(const std::exception_ptr& error, int rank);

/// The first error of one rank's engine, and those who must hear of it: whoever waits here, and the
/// other ranks, through the board.
///
/// Made before any of the engine's threads, and gone after all of them ("Failure" in
/// docs/notes/communication.md). All members may be called from any thread.
class Failure {
 public:
  /// Ends what somebody waits for. Called once, on the thread that failed; does not throw.
  using Listener = std::function<void(const std::exception_ptr& error, const std::string& why)>;

  /// `engine`: its name on the board, the same on all ranks and never used twice.
  Failure(comm::World& world, std::string engine);
  Failure(const Failure&) = delete;
  Failure& operator=(const Failure&) = delete;

  /// Closes when it goes: the last member of whoever owns what listeners reach, so that it is the
  /// first to go, also where a constructor throws.
  class Closing {
   public:
    explicit Closing(Failure& failure) : failure_(failure) {}
    Closing(const Closing&) = delete;
    Closing& operator=(const Closing&) = delete;
    ~Closing() { failure_.close(); }

   private:
    Failure& failure_;
  };

  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Whether it failed for a reason of its own, and not because another rank did.
  bool is_own() const;
  /// Throws the first error, if there was one.
  void check() const;
  /// The engine cannot go on: keeps the first error, tells the other ranks and every listener.
  void fail(std::exception_ptr error, log::Level level = log::Level::Error) noexcept;
  /// In a handler: fails with the error that is handled, and throws the first one.
  [[noreturn]] void fail_and_throw();
  /// Tells `listener` of the first error: at once, if there has been one.
  void listen(Listener listener);

  /// The engine ends: what fails from now on is what it leaves undone, and no news.
  void ending();
  /// Nobody is told any more. Returns when nobody is being told.
  void close() noexcept;
  /// Waits for a failure or the end, at most so long; whether one of them came.
  bool wait(std::chrono::duration<double> limit) const;

  /// This rank's engine has ended in good order, `where`: so the board says.
  void post_end(std::string_view where);
  /// A rank cannot be reached: unless the board says why, its process is gone, and nothing that
  /// ends here waits for it.
  void lost(int rank) noexcept;
  /// What the board says of a rank that can no longer be reached: why it failed or where it ended.
  std::optional<std::string> fate_of(int rank) const;
  /// What to say of a rank: what the board says of it, or else `known`.
  std::string describe(int rank, std::string known) const noexcept;
  /// After a failure: waits until the other ranks have heard of it or have ended, at most so long.
  /// The board may be in this process, and go with it.
  void wait_until_heard(std::chrono::duration<double> limit) const noexcept;

 private:
  std::exception_ptr root_cause(std::exception_ptr error) noexcept;
  std::string key(std::string_view what, int rank) const;

  comm::World& world_;
  const std::string engine_;
  std::atomic<bool> failed_{false};
  std::atomic<int> lost_{-1};  // the first rank whose process is gone
  mutable RankedMutex<LockRank::Failure> mutex_;
  mutable Condition changed_;
  std::vector<Listener> listeners_;  // guarded by mutex_; fixed once there is an error
  std::exception_ptr error_;         // guarded by mutex_
  std::string why_;                  // guarded by mutex_
  bool ending_ = false;              // guarded by mutex_
  bool closed_ = false;              // guarded by mutex_
  int notifying_ = 0;                // guarded by mutex_: threads that call listeners
};

}  // namespace pagoda::engine

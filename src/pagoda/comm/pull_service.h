// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/group.h"

namespace pagoda::comm {

/// What another rank wants: `bytes` bytes at `begin` of what `key` names, as of `version`.
struct PullRequest {
  int source = -1;  ///< who asks
  std::uint64_t key = 0;
  std::uint64_t version = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

/// Where a handler puts its answer: bytes, or why there are none. Throwing says why, too.
class PullReply {
 public:
  PullReply(std::stop_token stop, std::function<void()> waits)
      : stop_(std::move(stop)), waits_(std::move(waits)) {}

  /// Exactly the bytes asked for. They are sent from where they lie; `owner` keeps them there.
  void give(std::span<const std::byte> data, std::shared_ptr<const void> owner = {});
  void refuse(std::string why);
  /// The version that was asked for is no longer there: VersionGone.
  void refuse_version(std::string why);
  /// To be called before waiting for a version: another thread takes over meanwhile, so that any
  /// number of waiting handlers does not keep the others from being answered.
  void about_to_wait() { waits_(); }
  /// Asked to stop when the service ends: a waiting handler then returns or throws.
  const std::stop_token& stop() const noexcept { return stop_; }

 private:
  friend class PullService;
  std::stop_token stop_;
  std::function<void()> waits_;
  bool answered_ = false;
  std::span<const std::byte> data_;
  std::shared_ptr<const void> owner_;
  std::string error_;
  bool version_gone_ = false;
};

/// One read of PullService::pull(); `out` says how many bytes.
struct Pull {
  int rank = -1;
  std::uint64_t key = 0;
  std::uint64_t version = 0;
  std::uint64_t begin = 0;
  std::span<std::byte> out;
};

/// Reads from other ranks' memory whatever those ranks are doing: each rank answers from threads of
/// its own, on a group of its own, so that nobody has to be in step.
///
/// pull(), abort() and stats() may be called from any threads at once. The handler is called from
/// several threads at once, and from the caller's own when a rank asks itself.
class PullService {
 public:
  using Handler = std::function<void(const PullRequest&, PullReply&)>;

  struct Options {
    /// Threads that run handlers and do not wait.
    std::size_t threads = 2;
    /// All of them, with those that wait (PullReply::about_to_wait). Further requests queue.
    std::size_t max_threads = 256;
    /// Called once, on the service's thread, if it can no longer serve though nobody ended it.
    std::function<void(const std::string& reason)> on_failure = {};
  };

  struct Stats {
    std::uint64_t pulls = 0;  ///< asked of others by this rank
    std::uint64_t bytes_pulled = 0;
    std::uint64_t served = 0;  ///< answered for others by this rank, refusals included
    std::uint64_t bytes_served = 0;
    std::uint64_t refused = 0;
  };

  /// Serves from here on.
  PullService(std::unique_ptr<Group> group, Handler handler, Options options);
  PullService(std::unique_ptr<Group> group, Handler handler)
      : PullService(std::move(group), std::move(handler), Options()) {}
  PullService(const PullService&) = delete;
  PullService& operator=(const PullService&) = delete;
  /// Ends at once and tells nobody: callers agree first that nobody pulls any more. Waits for
  /// running handlers, which see stop().
  ~PullService();

  /// Fills `out`. RemoteError or VersionGone if that rank's handler refused, GroupAborted,
  /// PeerLost.
  void pull(int rank, std::uint64_t key, std::uint64_t version, std::uint64_t begin,
            std::span<std::byte> out);
  /// The same for many, all asked for before any is waited for. Throws the first failure in the
  /// order of `pulls`, once all are answered.
  void pull(std::span<const Pull> pulls);

  /// Every blocked or later pull on this rank throws GroupAborted; serving ends.
  void abort(std::string reason) noexcept;

  Stats stats() const noexcept;
  /// For how long pulls have been under way; 0: none is. Any thread.
  Nanos waited() const noexcept { return pulls_.waited(); }
  int rank() const noexcept { return group_->rank(); }
  int size() const noexcept { return group_->size(); }

 private:
  struct Job {
    PullRequest request;
    Tag tag = 0;  // of the answer
  };

  void listen();
  void enqueue(const Job& job);
  void work();
  /// Adds a thread if a job waits and too few threads run.
  void grow(const RankedLock<LockRank::PullService>&);
  PullReply ask_handler(const PullRequest& request, std::function<void()> waits);
  void answer(const Job& job);
  void pull_here(const Pull& pull);

  const std::unique_ptr<Group> group_;
  const Handler handler_;
  const Options options_;
  std::stop_source stop_;
  std::atomic<std::uint32_t> next_tag_ = 0;

  RankedMutex<LockRank::PullService> mutex_;
  Condition wake_;
  std::deque<Job> jobs_;              // guarded by mutex_
  std::size_t idle_ = 0;              // guarded by mutex_: workers without a job
  std::size_t waiting_ = 0;           // guarded by mutex_: workers whose handler waits
  bool stopping_ = false;             // guarded by mutex_
  std::vector<std::thread> workers_;  // guarded by mutex_ until stopping_

  WaitMeter pulls_;
  TrafficMeter pulled_;
  TrafficMeter served_;
  std::atomic<std::uint64_t> refused_ = 0;
  std::thread listener_;  // last: uses all of the above
};

}  // namespace pagoda::comm

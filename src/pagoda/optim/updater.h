// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/thread_pool.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/state_layout.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/optim/update_chunk.h"
#include "pagoda/optim/update_queue.h"
#include "pagoda/pager/pager.h"
#include "pagoda/pager/pending_updates.h"

namespace pagoda::optim {

struct UpdateRecord;
struct UpdateSlot;

struct UpdaterStats {
  std::uint64_t pages = 0;
  std::uint64_t early = 0;        // of these, begun before their step()
  std::uint64_t rolled_back = 0;  // of those, made again in their step()
  std::uint64_t elements = 0;
  Nanos busy = 0;          // in the kernels
  Nanos waited_io = 0;     // for state to arrive or to leave
  Bytes nvme_read = 0;     // state, gradients and parameters for updates
  Bytes nvme_written = 0;  // …
};

/// Applies pending updates, in the order it is given, on a thread of its own.
///
/// State that is not in memory streams through a fixed set of buffers: while one chunk is updated,
/// the next are read and the last are written (docs/notes/lazy-updates.md). All members may be
/// called from any thread.
class Updater final : public pager::PendingUpdates {
 public:
  /// Buffers that are taken however small the host's budget is: reads and writes overlap with them.
  static constexpr unsigned kLeastBuffers = 4;

  struct Options {
    StateLayout::Master master16 = StateLayout::Master::Whole;  // for 16-bit parameters
    kernels::Dtype moments = kernels::Dtype::F32;
    std::uint64_t chunk = 1U << 20;  // elements
    /// …of pages that need no buffers, if more: every thread gets work that is worth waking it.
    std::uint64_t chunk_in_memory = 16U << 20;
    unsigned buffers = 4;    // chunks on their way
    std::uint64_t seed = 0;  // of stochastic rounding
    /// Told of the first error, on the thread that met it.
    std::function<void(std::exception_ptr)> on_failure;
  };
  /// Called on the updater's thread when this rank's shard of a page is done. True: the page is up
  /// to date; false: the callee says so to the pager later (other ranks' shards are missing).
  using Finished = std::function<bool(TrainedPage&, std::uint64_t version)>;
  /// Called on the thread that is about to write to a page, or to hold it; may wait.
  using Writing = std::function<void(pager::Page&)>;

  Updater(pager::Pager& pager, ThreadPool& pool, Options options);
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;
  ~Updater() override;
  /// Drops updates that have not begun and ends the thread: no callback runs afterwards.
  void stop() noexcept;

  void set_callbacks(Finished finished, Writing writing, Writing holding = {});

  /// The layout of a page's state under `optimizer`.
  StateLayout layout(const TrainedPage& page, const Optimizer& optimizer) const;
  /// Knows the page from now on. Its state is blank.
  void add(TrainedPage& page, const Optimizer& optimizer);
  void remove(TrainedPage& page);

  /// Host memory that early updates of a page take beside what it has.
  struct EarlyBytes {
    Bytes spare = 0;  // TrainedPage::spare, where they can be rolled back
    Bytes next = 0;   // TrainedPage::next; none where parameters go over the gradient
  };
  /// Of a page that add() has told of; nothing where none of its updates may begin early.
  std::optional<EarlyBytes> early_bytes(const TrainedPage& page, bool reversible) const;

  /// The pages, which the pager knows to have a pending update, are updated: in this order, where
  /// follow() has said nothing of them.
  void start(std::span<TrainedPage* const> order, std::shared_ptr<const StepScalars> scalars);
  /// Whether an update of the page can begin before its step().
  bool may_start_early(const TrainedPage& page, bool reversible) const;
  /// A page whose gradient is complete is updated before step(), which nobody sees until release():
  /// home keeps the parameters of before. `reversible`: so do state and gradient. See "Early
  /// updates" in docs/notes/lazy-updates.md.
  void start_early(TrainedPage& page, std::shared_ptr<const StepScalars> scalars, bool reversible);
  /// Returns when an early update of the page, if one has been started, has been computed.
  void wait_for_early(const TrainedPage& page);
  /// Whether an early update of the page has been started, and step() has not taken it yet.
  bool early(const TrainedPage& page) const;
  /// step() takes these early updates; the pager knows that they are pending. What has been
  /// computed becomes visible at once, the rest when it has been.
  void release(std::span<TrainedPage* const> pages);
  /// Forgets early updates, as if they had never begun: reversible ones, and any of which nothing
  /// has been computed. Returns when none of them is under way.
  void roll_back(std::span<TrainedPage* const> pages);
  /// What waits is made in this order, and so is what is started until the next call: what the next
  /// forward needs first must not wait for the rest. What is not in it comes last.
  void follow(std::span<TrainedPage* const> order);

  void wait_for_update(pager::Page& page) override;
  /// Where this rank updates all of the page, and nothing has to be read for it first.
  bool can_wait_for_rows(const pager::Page& page, std::uint64_t wanted) override;
  const std::byte* wait_for_rows(pager::Page& page, std::span<const pager::Range> rows) override;
  void about_to_write(pager::Page& page) override;
  void about_to_hold(pager::Page& page) override;
  pager::Range kept(const pager::Page& page, pager::Range shard) override;
  void overwritten(pager::Page& page, std::uint64_t begin, std::uint64_t count,
                   const std::byte* before, const std::byte* after) override;
  /// Returns when this rank's shard of the page has seen `version` updates.
  void wait_for_shard(const pager::Page& page, std::uint64_t version);
  /// Returns when this rank's shard of the page has seen every update started so far: its gradient
  /// has been used up.
  void wait_for_shard(const pager::Page& page);
  /// Returns when no update is pending any more. Throws what went wrong.
  void wait_for_all();

  /// Every pending update fails with `error` from now on, and whoever waits throws it.
  void fail(std::exception_ptr error) noexcept;
  UpdaterStats stats() const;

 private:
  class Waiter;
  Bytes buffered_bytes(const TrainedPage& page, const StateLayout& layout) const;
  void call_of_trained(const Writing& callback, pager::Page& page);
  void enqueue(UpdateRecord& record, std::shared_ptr<const StepScalars> scalars);
  void enqueue(UpdateRecord& record);
  void run();
  void fill_slots(RankedLock<LockRank::Updater>& lock);
  void compute(UpdateSlot& slot);
  void make_rows(UpdateRecord& record, RankedLock<LockRank::Updater>& lock);
  void finish(UpdateSlot& slot);
  void page_done(UpdateRecord& record);
  void publish(UpdateRecord& record);

  pager::Pager& pager_;
  ThreadPool& pool_;
  const Options options_;
  Finished finished_;
  Writing before_write_;
  Writing before_hold_;

  mutable RankedMutex<LockRank::Updater> mutex_;
  Condition changed_;
  std::unordered_map<const pager::Page*, std::unique_ptr<UpdateRecord>>
      records_;                      // guarded by mutex_
  UpdateQueue queue_;                // guarded by mutex_
  std::deque<UpdateRecord*> asked_;  // for rows, which go before all else; guarded by mutex_
  std::size_t pending_ = 0;          // pages queued or under way; guarded by mutex_
  std::exception_ptr error_;         // guarded by mutex_
  bool stopping_ = false;            // guarded by mutex_
  UpdaterStats stats_;               // guarded by mutex_

  // The rest belongs to the thread.
  std::vector<std::unique_ptr<UpdateSlot>> slots_;
  std::deque<UpdateSlot*> free_;
  std::deque<UpdateSlot*> reading_;  // oldest first
  std::deque<UpdateSlot*> writing_;
  UpdateRecord* current_ = nullptr;
  std::uint64_t next_chunk_ = 0;
  std::jthread thread_;
};

}  // namespace pagoda::optim

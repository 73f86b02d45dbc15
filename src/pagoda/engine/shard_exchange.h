// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/thread_pool.h"
#include "pagoda/comm/pull_service.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"
#include "pagoda/pager/remote_shards.h"
#include "pagoda/pager/staging_pool.h"

namespace pagoda::engine {

/// What ranks read of each other's pages: shards, when a page is fetched, and shards that others
/// have updated, where every rank keeps whole pages. One-sided: nobody has to be in step
/// ("Shards are pulled" in docs/notes/schedule.md). All members may be called from any thread.
class ShardExchange final : public pager::RemoteShards {
 public:
  struct Options {
    int rank = 0;
    /// Every rank keeps whole pages and updates its shard of them (stages 1 and 2).
    bool whole_pages = false;
    /// Bytes of each of its buffers.
    Bytes staging = 4_MiB;
    /// Told of what goes wrong here, on the thread that met it.
    std::function<void(std::exception_ptr)> on_failure;
    /// Told when this rank can no longer answer the others.
    std::function<void(const std::string& reason)> on_end;
  };

  /// Buffers of Options::staging bytes for what is not in memory: through two of them others are
  /// served, and through two more pages are completed where they are kept whole. Apart, for who
  /// completes a page waits for those who serve.
  static constexpr Bytes staging_buffers(bool whole_pages) noexcept {
    return kServed + (whole_pages ? kCompleted : 0);
  }
  /// …which are taken unless everything lies in memory that the host may read.
  static constexpr bool needs_buffers(device::DeviceKind kind, bool swaps) noexcept {
    return kind != device::DeviceKind::Host || swaps;
  }

  ShardExchange(std::unique_ptr<comm::Group> group, pager::Pager& pager, optim::Updater& updater,
                Options options);
  ~ShardExchange() override;

  void pull(pager::PageId page, std::uint64_t version, std::span<const Piece> pieces) override;

  /// Bytes that ranks ask of each other at a time: no more than any of them has in a buffer. Before
  /// the first share().
  void set_piece(Bytes piece) noexcept { piece_.store(std::min(piece, options_.staging)); }

  /// From now on other ranks may ask for these pages, and this one asks for theirs: under numbers
  /// from 1 on that are the same on all ranks, which call this alike, and never used twice.
  void share(std::span<pager::Page* const> pages);
  /// Nobody needs the page any more, on any rank: whoever asks is refused. Returns when nobody is
  /// being answered.
  void unshare(const pager::Page& page);
  bool is_shared(const pager::Page& page);

  /// This rank's shard of a page is up to date. False: the other ranks' shards are still to come.
  bool shard_updated(optim::TrainedPage& page, std::uint64_t version);
  /// Returns when no page lacks other ranks' shards.
  void wait_for_completion();
  /// User code is about to write: returns when the others have read this rank's shard.
  void wait_for_other_ranks(const pager::Page& page);

  /// Ends all waiting.
  void fail(const std::string& why) noexcept;
  comm::PullService::Stats stats() const { return pulls_->stats(); }
  /// For how long this rank has waited for others' shards; 0: it does not. Any thread.
  Nanos waited() const noexcept { return pulls_->waited(); }

 private:
  static constexpr std::size_t kServed = 2;
  static constexpr std::size_t kCompleted = 2;

  struct Served {
    std::uint64_t version = 0;
    Bytes bytes = 0;
  };
  struct Serving;
  /// A page that others may ask for.
  struct Shared {
    pager::Page* page = nullptr;
    std::vector<std::uint64_t> keys;  // the last is what this rank asks for
    std::size_t answering = 0;        // threads
  };

  std::uint64_t key_of(pager::PageId page);
  std::shared_ptr<pager::Page> find(std::uint64_t key);

  void add_pulls(const Piece& piece, std::uint64_t key, std::uint64_t version,
                 std::vector<comm::Pull>& pulls) const;
  void serve(const comm::PullRequest& request, comm::PullReply& reply);
  void served(const pager::Page& page, std::uint64_t version, Bytes bytes);
  void complete(optim::TrainedPage& page, std::uint64_t version);

  pager::Pager& pager_;
  optim::Updater& updater_;
  const Options options_;
  const int ranks_;
  std::atomic<Bytes> piece_;

  RankedMutex<LockRank::ShardExchange> mutex_;
  Condition changed_;
  std::size_t completing_ = 0;                               // guarded by mutex_
  std::unordered_map<pager::PageId, Served> to_others_;      // guarded by mutex_
  std::unordered_map<pager::PageId, Shared> shared_;         // guarded by mutex_
  std::unordered_map<std::uint64_t, pager::PageId> of_key_;  // guarded by mutex_
  std::uint64_t next_key_ = 1;                               // guarded by mutex_
  bool failed_ = false;                                      // guarded by mutex_

  std::optional<pager::StagingPool> to_serve_;     // where something is not in memory
  std::optional<pager::StagingPool> to_complete_;  // …and pages are kept whole
  std::unique_ptr<comm::PullService> pulls_;
  ThreadPool completers_;  // last: its threads use all of the above
};

}  // namespace pagoda::engine

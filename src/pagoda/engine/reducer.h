// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/group.h"
#include "pagoda/engine/collective.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/engine/frozen_parameters.h"
#include "pagoda/optim/gradients.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/optim/updater.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// A page's gradient of one micro-batch, on the device.
struct Contribution {
  optim::TrainedPage* page = nullptr;
  std::vector<bool> present;        // for each parameter of the page
  const std::byte* data = nullptr;  // the whole page, in its type and layout
  std::shared_ptr<void> keep;       // what `data` lives in
  device::Mark ready;               // on the device's stream; empty: ready now
  bool late = false;                // comes after its pass: thawed while that was under way
};

struct ReducerStats {
  std::uint64_t contributions = 0;
  std::uint64_t rounds = 0;
  std::uint64_t parked = 0;  // contributions that waited for their turn on the host
  std::uint64_t large = 0;   // contributions larger than what may wait on the device
  Bytes device_to_host = 0;
  Bytes exchanged = 0;   // sent to other ranks
  Nanos push_stall = 0;  // backward waited for room
};

/// Brings gradients off the device, sums them over the ranks and adds them up, on a thread of its
/// own, while backward goes on.
///
/// A micro-batch is a round: every rank goes through the same pages in the same order, a bucket of
/// them at a time, with zeros for what it has no gradient of. A rank that is in a call takes part
/// with zeros until all are: this is where ranks meet. See "Gradients" in docs/notes/schedule.md
/// and docs/notes/communication.md. All members may be called from any thread, push() while a round
/// is open only.
class Reducer {
 public:
  struct Options {
    Bytes bucket = 32_MiB;
    /// Gradient bytes that may wait on the device. A gradient that is larger leaves it before
    /// push() returns.
    Bytes device_limit = 0;
    /// Told of the first error, on the thread that met it.
    std::function<void(std::exception_ptr)> on_failure;
    /// What the others are told of a rank that has a micro-batch. Any thread.
    std::function<Collective()> in_backward;
  };

  /// Host memory through which gradients go that wait on disk for their turn.
  static constexpr Bytes parking_bytes(device::DeviceKind kind, int ranks) noexcept {
    return ranks > 1 && kind == device::DeviceKind::Cuda ? 1_MiB : 0;
  }

  /// Over which groups ranks meet, and gradients go. Null: one rank.
  struct Groups {
    comm::Group* calls = nullptr;
    comm::Group* gradients = nullptr;
  };

  Reducer(Groups groups, pager::Pager& pager, optim::Gradients& gradients, optim::Updater& updater,
          EarlyUpdates& early, FrozenParameters& frozen, Options options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  /// Gradients come of pages whose numbers are below `count`, frozen ones included.
  void set_pages(std::size_t count);
  /// The pages of a round in the order in which the ranks go through them: the same everywhere. Not
  /// while a round is open.
  void set_order(std::vector<optim::TrainedPage*> order);
  /// Host memory that set_order() with these pages would take, beyond what it has taken before.
  Bytes host_bytes(std::span<optim::TrainedPage* const> order) const;
  /// The same for rounds that go through these pages, too.
  Bytes host_bytes_with(std::span<optim::TrainedPage* const> pages) const;
  /// Takes buffers for rounds that go through these pages, too; set_order() uses them.
  void make_room_for(std::span<optim::TrainedPage* const> pages);

  /// A micro-batch's gradients begin to come; `last`: of the step. Optional: push() begins a round
  /// by itself.
  void begin(bool last);
  /// Hands a gradient over; waits for room, and until one that is larger than all of the room has
  /// left the device. A second one for the same page ends the round and
  /// begins the next.
  void push(Contribution contribution);
  /// No more gradients come in this micro-batch.
  void end();
  /// This rank is in a call: returns what every rank is in, by rank, when all are in one and all
  /// gradients are added up. Throws what went wrong; Diverged if the calls are not the same.
  std::vector<Collective> meet(Collective mine);
  /// The same without waiting, for a rank that ends.
  void announce(Collective mine);
  /// Whether all ranks have met since announce(), or never will.
  bool met() const;
  /// What meet() has heard: whether anything is thawed on any rank.
  bool thaw_news() const;

  /// Page numbers in the order in which their gradients last came; for set_order().
  std::vector<std::uint32_t> arrival_order() const;
  void fail(std::exception_ptr error) noexcept;
  ReducerStats stats() const;

 private:
  static constexpr Bytes kAlignment = 64;  // of every part of a message

  struct Arrival {
    Contribution contribution;
    pager::Home parked;  // holds the bytes, when the device had no room for them
  };
  struct Round {
    std::vector<std::optional<Arrival>> arrived;  // by page number
    std::vector<std::uint32_t> order;             // as they came
    std::size_t taken = 0;                        // of `order`, by the thread of a single rank
    FrozenSet thawed;                             // on this rank, when it began
    bool opened = false;                          // …and all ranks have heard of that
    bool over = false;
    bool last = false;   // of the step, on this rank
    bool ended = false;  // nobody adds anything of it up any more
  };
  /// Elements [begin, begin + count) of every rank's shard of a page.
  struct Item {
    optim::TrainedPage* page;
    std::uint64_t begin;
    std::uint64_t count;
    bool last;  // of its page
  };
  struct Plan {
    std::vector<std::vector<Item>> buckets;
    Bytes message = 0;  // the most that goes one way at a time; 0: no buffers are needed
  };
  struct Buffers {
    pager::HostBlock outgoing;
    pager::HostBlock incoming;
    Bytes message = 0;
  };
  using Lock = RankedLock<LockRank::Reducer>;
  using Kept = std::vector<std::shared_ptr<void>>;  // what gradients lived in

  void run();
  void run_alone(Lock& lock);
  void run_round(Round* round, Lock& lock);
  void exchange(std::span<const Item> bucket, Round* round);
  pager::Range part(const Item& item, int rank) const;
  Bytes message_bytes(std::span<const Item> bucket, int rank) const;
  void read_contribution(const Arrival& arrival, pager::Range range, std::byte* to);
  const std::byte* in_host_memory(const Arrival& arrival) const;
  bool ask(optim::TrainedPage& page, const Round* round);
  void open(Round* round, bool thawed, Lock& lock);
  void end_round(Lock& lock);
  [[nodiscard]] std::shared_ptr<void> release(Arrival& arrival, const Lock& lock);
  bool is_large(const Contribution& contribution) const noexcept;
  bool has_room_for(const Contribution& contribution, const Lock& lock) const noexcept;
  void park(Arrival& arrival, Lock& lock);
  void move_to_host(Arrival& arrival);
  static Bytes flag_bytes(const optim::TrainedPage& page);
  Plan make_plan(std::span<optim::TrainedPage* const> order) const;
  Bytes buffers_for(Bytes message) const;
  Plan plan_with(std::span<optim::TrainedPage* const> pages) const;
  Buffers take_buffers(Bytes message);
  void use_plan(Plan plan, const Lock& lock);
  Round& new_round(const Lock& lock);
  Kept admit(Round* round, Lock& lock);

  bool allows_early(const Collective& mine, std::span<const Collective> all) const;

  const Groups groups_;
  pager::Pager& pager_;
  optim::Gradients& gradients_;
  optim::Updater& updater_;
  EarlyUpdates& early_;
  FrozenParameters& frozen_;
  const Options options_;
  const int ranks_;
  const int rank_;

  mutable RankedMutex<LockRank::Reducer> mutex_;
  Condition changed_;
  std::size_t pages_ = 0;                      // guarded by mutex_
  std::vector<optim::TrainedPage*> order_;     // guarded by mutex_
  std::vector<std::vector<Item>> buckets_;     // guarded by mutex_, fixed while a round runs
  std::deque<std::shared_ptr<Round>> rounds_;  // guarded by mutex_
  std::vector<std::uint32_t> arrival_order_;   // guarded by mutex_
  Bytes on_device_ = 0;                        // guarded by mutex_
  std::size_t large_parked_ = 0;               // guarded by mutex_: that wait on the host
  bool wants_local_ = false;  // guarded by mutex_: the thread waits for a gradient of this rank
  std::optional<Collective> call_;  // guarded by mutex_: that this rank is in and has not met in
  std::vector<Collective> met_;     // guarded by mutex_: in its last call
  bool thaw_news_ = false;          // guarded by mutex_: …on some rank
  bool stopping_ = false;           // guarded by mutex_
  std::exception_ptr error_;        // guarded by mutex_
  ReducerStats stats_;              // guarded by mutex_

  bool may_begin_ = true;  // the thread's own: updates of this round may begin before step()

  std::shared_ptr<device::Stream> stream_;
  RankedMutex<LockRank::Parking> park_mutex_;    // one gradient is parked at a time
  std::shared_ptr<device::Stream> park_stream_;  // guarded by park_mutex_
  pager::HostBlock parking_;                     // guarded by park_mutex_; for what goes to disk
  Buffers buffers_;
  Buffers next_buffers_;  // guarded by mutex_: taken ahead, for pages that may join
  std::jthread thread_;
};

}  // namespace pagoda::engine

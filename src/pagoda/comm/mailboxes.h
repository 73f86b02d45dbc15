// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "pagoda/base/clock.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/transfer.h"
#include "pagoda/device/emulated/link.h"

namespace pagoda::comm {

/// Where the ranks of one in-memory group meet: a send and a receive that match are copied from
/// memory to memory by whichever thread came second.
///
/// All members may be called from any thread.
class Mailboxes {
 public:
  /// One outgoing link a rank, shared by all groups of a world; or none at all.
  using Links = std::vector<std::shared_ptr<device::emulated::Link>>;

  Mailboxes(int ranks, Links links);

  /// Carries out `transfers` of rank `me`. False if abort(me) ended it. Throws PeerLost when a peer
  /// has left, EngineError when a message does not fit.
  bool exchange(int me, std::span<const Transfer> transfers);
  /// The source of the next message with this tag to `me`, or -1 if abort(me) ended it.
  int receive_any(int me, Tag tag, std::span<std::byte> data);
  /// Ends what rank `me` waits for, now and from now on.
  void abort(int me) noexcept;
  /// Rank `me` has gone: whoever waits for it or sends to it gets PeerLost.
  void leave(int me) noexcept;

 private:
  using Lock = RankedLock<LockRank::Mailboxes>;

  /// Where a call waits for its posts.
  struct Waiter {
    Condition wake;
    std::size_t open = 0;  // posts that are Waiting or Moving
    bool failed = false;   // one of them is Lost or Misfit
  };

  enum class State {
    Waiting,    ///< in a queue: nobody touches its memory
    Moving,     ///< matched: a thread copies, its memory must stay
    Done,       ///< copied
    Withdrawn,  ///< its own call gave up
    Lost,       ///< the peer has left
    Misfit,     ///< the message is longer than the receiver's span
  };

  /// One side of a message. Lives in its call's frame; guarded by mutex_ but for the bytes.
  struct Post {
    Transfer transfer;
    int owner = -1;
    Waiter* waiter = nullptr;
    State state = State::Waiting;
    Post* partner = nullptr;  // while Moving
    int source = -1;          // who sent it, once matched
    Nanos ready_at = 0;       // when an emulated link has carried it
  };
  /// Waiting posts addressed to one rank, by tag, oldest first.
  using Queues = std::map<Tag, std::deque<Post*>>;

  bool run(int me, std::span<Post> posts);
  /// Pairs `post` with a waiting one, or queues it.
  void place(const Lock&, Post& post);
  /// Copies what this thread has matched, without the lock.
  void move(Lock& lock, std::span<Post* const> matched);
  void finish(const Lock&, Post& post, State state);
  /// Takes out of `queues` and finishes the posts that `which` picks.
  template <class Which>
  void sweep(const Lock& lock, Queues& queues, State state, Which which);
  void withdraw(const Lock& lock, const Waiter& waiter);
  [[noreturn]] static void fail(std::span<const Post> posts);

  const Links links_;
  RankedMutex<LockRank::Mailboxes> mutex_;
  std::vector<Queues> sends_;     // guarded by mutex_, by destination
  std::vector<Queues> receives_;  // guarded by mutex_, by destination
  std::vector<bool> aborted_;     // guarded by mutex_
  std::vector<bool> gone_;        // guarded by mutex_
};

}  // namespace pagoda::comm

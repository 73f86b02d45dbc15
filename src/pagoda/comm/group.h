// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/comm/comm_error.h"
#include "pagoda/comm/traffic.h"
#include "pagoda/comm/transfer.h"
#include "pagoda/comm/wait_meter.h"

namespace pagoda::comm {

/// All ranks of a World, connected for themselves: what goes through one group never meets what
/// goes through another. Every call blocks until its memory may be used again.
///
/// Collectives are called by every rank in the same order, from one thread at a time.
/// Point-to-point calls may be made from any threads at once, beside a collective too. abort() and
/// stats() may be called at any time.
///
/// When a peer is lost the call that notices throws PeerLost and the group is aborted. How a
/// backend moves bytes is its do_exchange(); everything else is built on it unless the backend has
/// something better. An ordered fp32 reduce-scatter is all_to_all() and a sum in rank order by the
/// caller, who knows the element type and has the kernels.
class Group {
 public:
  Group(int rank, int size, std::string name);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  /// Ends this rank's part without waiting for the others: who still waits for it gets PeerLost.
  virtual ~Group() = default;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const std::string& name() const noexcept { return name_; }

  /// Everyone's bytes to everyone. parts[r] has the size of rank r's `mine`, which may differ
  /// between ranks and be zero; parts[rank()] is filled too and may be `mine` itself.
  void all_gather(std::span<const std::byte> mine, std::span<const std::span<std::byte>> parts);
  /// to[r] arrives as from[rank()] on rank r. Sizes may differ and be zero; a pair of ranks agrees.
  void all_to_all(std::span<const std::span<const std::byte>> to,
                  std::span<const std::span<std::byte>> from);
  /// The root's bytes to everyone. Empty `data` (on every rank) does nothing.
  void broadcast(std::span<std::byte> data, int root);
  /// Returns when every rank has called it.
  void barrier();

  /// Each value becomes the largest one of the ranks, or the bits that any of them has.
  void all_reduce_max(std::span<std::uint64_t> values);
  void all_reduce_or(std::span<std::uint64_t> values);

  /// Messages of at least one byte to another rank, matched by peer and tag (below kTags), in the
  /// order in which they were posted. A message may be shorter than the receiver's span (who then
  /// has to know from elsewhere), never longer. Sending may wait for the receiver to be there.
  void send(int to, Tag tag, std::span<const std::byte> data);
  void recv(int from, Tag tag, std::span<std::byte> data);
  /// The next message with this tag from anyone; its source. Such a tag is received in no other
  /// way, by one thread at a time.
  int recv_any(Tag tag, std::span<std::byte> data);
  /// Posts all `transfers` before it waits for any.
  void exchange(std::span<const Transfer> transfers);

  /// Every blocked or later call on this rank throws GroupAborted with the first `reason`. Peers
  /// are not told (see Watch). Any thread.
  void abort(std::string reason) noexcept;
  bool aborted() const noexcept { return aborted_.load(std::memory_order_acquire); }

  GroupStats stats() const noexcept;
  /// For how long a collective has been under way; 0: none is. Any thread.
  Nanos waited() const noexcept { return collectives_.waited(); }
  /// Device memory that the group itself keeps for what passes through it.
  virtual std::uint64_t buffer_bytes() const noexcept { return 0; }

 protected:
  /// Throws GroupAborted if abort() has been called.
  void check_alive() const;

 private:
  /// Posts all before it waits for any; no transfer is empty. Throws PeerLost, or GroupAborted once
  /// do_abort() has run, and touches no memory afterwards.
  virtual void do_exchange(std::span<const Transfer> transfers) = 0;
  virtual int do_recv_any(Tag tag, std::span<std::byte> data) = 0;
  /// Wakes whoever is blocked; what is posted afterwards fails at once. Called once, from any
  /// thread.
  virtual void do_abort() noexcept = 0;
  virtual void do_all_gather(std::span<const std::byte> mine,
                             std::span<const std::span<std::byte>> parts);
  virtual void do_all_to_all(std::span<const std::span<const std::byte>> to,
                             std::span<const std::span<std::byte>> from);
  virtual void do_broadcast(std::span<std::byte> data, int root);

  template <class Fn>
  auto guarded(Fn&& fn);
  template <class Fold>
  void all_reduce(std::span<std::uint64_t> values, Fold fold);
  void check_peer(int peer, Tag tag, std::size_t bytes) const;

  const int rank_;
  const int size_;
  const std::string name_;
  std::atomic<bool> in_collective_ = false;
  WaitMeter collectives_;
  std::atomic<bool> aborted_ = false;
  mutable RankedMutex<LockRank::GroupAbort> abort_mutex_;
  std::string abort_reason_;  // guarded by abort_mutex_, set once
  TrafficMeter gather_;
  TrafficMeter all_to_all_;
  TrafficMeter broadcast_;
  TrafficMeter point_to_point_;
  TrafficMeter control_;
};

}  // namespace pagoda::comm

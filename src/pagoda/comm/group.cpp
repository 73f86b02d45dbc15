// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/group.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "pagoda/base/trace.h"

namespace pagoda::comm {
namespace {

// One tag for every collective: a pair's messages keep their order, and collectives theirs.
constexpr Tag kCollectiveTag = kTags;

/// Claims the group for one collective, so that a second thread is told instead of mixed in.
class CollectiveClaim {
 public:
  CollectiveClaim(std::atomic<bool>& claimed, WaitMeter& meter, const std::string& group)
      : claimed_(claimed), waiting_(meter) {
    PAGODA_CHECK(!claimed_.exchange(true, std::memory_order_acquire),
                 "two threads are in collectives of group '{}' at once", group);
  }
  CollectiveClaim(const CollectiveClaim&) = delete;
  CollectiveClaim& operator=(const CollectiveClaim&) = delete;
  ~CollectiveClaim() { claimed_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& claimed_;
  const WaitMeter::Waiting waiting_;
};

template <class Spans>
std::uint64_t bytes_of_others(const Spans& spans, std::size_t me) {
  std::uint64_t sum = 0;
  for (std::size_t r = 0; r < spans.size(); ++r) sum += r == me ? 0 : spans[r].size();
  return sum;
}

void copy_own(std::span<std::byte> to, std::span<const std::byte> from) {
  if (!from.empty() && to.data() != from.data()) std::memmove(to.data(), from.data(), from.size());
}

}  // namespace

Group::Group(int rank, int size, std::string name)
    : rank_(rank), size_(size), name_(std::move(name)) {
  PAGODA_REQUIRE_GE(size, 1);
  PAGODA_REQUIRE(rank >= 0 && rank < size, "rank {} of {}", rank, size);
}

template <class Fn>
auto Group::guarded(Fn&& fn) {
  require_may_wait();
  check_alive();
  try {
    return fn();
  } catch (const PeerLost& lost) {
    check_alive();  // whoever aborted knows more than a closed connection does
    abort(lost.message());
    throw;
  }
}

void Group::all_gather(std::span<const std::byte> mine,
                       std::span<const std::span<std::byte>> parts) {
  const auto me = static_cast<std::size_t>(rank_);
  PAGODA_REQUIRE_EQ(parts.size(), static_cast<std::size_t>(size_), "all_gather: one part a rank");
  PAGODA_REQUIRE_EQ(parts[me].size(), mine.size(), "all_gather: this rank's own part");
  PAGODA_TRACE("comm", "all_gather", {"group", name_}, {"bytes", mine.size()});
  const CollectiveClaim claim(in_collective_, collectives_, name_);
  guarded([&] { do_all_gather(mine, parts); });
  gather_.add(mine.size() * (parts.size() - 1), bytes_of_others(parts, me));
}

void Group::all_to_all(std::span<const std::span<const std::byte>> to,
                       std::span<const std::span<std::byte>> from) {
  const auto me = static_cast<std::size_t>(rank_);
  PAGODA_REQUIRE_EQ(to.size(), static_cast<std::size_t>(size_), "all_to_all: one part a rank");
  PAGODA_REQUIRE_EQ(from.size(), static_cast<std::size_t>(size_), "all_to_all: one part a rank");
  PAGODA_REQUIRE_EQ(to[me].size(), from[me].size(), "all_to_all: this rank's own part");
  PAGODA_TRACE("comm", "all_to_all", {"group", name_}, {"bytes", bytes_of_others(to, me)});
  const CollectiveClaim claim(in_collective_, collectives_, name_);
  guarded([&] { do_all_to_all(to, from); });
  all_to_all_.add(bytes_of_others(to, me), bytes_of_others(from, me));
}

void Group::broadcast(std::span<std::byte> data, int root) {
  PAGODA_REQUIRE(root >= 0 && root < size_, "broadcast from rank {} of {}", root, size_);
  PAGODA_TRACE("comm", "broadcast", {"group", name_}, {"bytes", data.size()}, {"root", root});
  const CollectiveClaim claim(in_collective_, collectives_, name_);
  guarded([&] { do_broadcast(data, root); });
  const auto others = static_cast<std::uint64_t>(size_ - 1);
  broadcast_.add(rank_ == root ? data.size() * others : 0, rank_ == root ? 0 : data.size());
}

void Group::barrier() {
  std::uint64_t nothing = 0;
  PAGODA_TRACE("comm", "barrier", {"group", name_});
  all_reduce_or({&nothing, 1});
}

template <class Fold>
void Group::all_reduce(std::span<std::uint64_t> values, Fold fold) {
  PAGODA_TRACE("comm", "all_reduce", {"group", name_}, {"values", values.size()});
  const CollectiveClaim claim(in_collective_, collectives_, name_);
  const auto ranks = static_cast<std::size_t>(size_);
  std::vector<std::uint64_t> all(values.size() * ranks);
  std::vector<std::span<std::byte>> parts(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    parts[r] = std::as_writable_bytes(std::span(all).subspan(r * values.size(), values.size()));
  }
  guarded([&] { do_all_gather(std::as_bytes(values), parts); });
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = all[i];
    for (std::size_t r = 1; r < ranks; ++r) {
      values[i] = fold(values[i], all[r * values.size() + i]);
    }
  }
  control_.add(values.size_bytes() * (ranks - 1), values.size_bytes() * (ranks - 1));
}

void Group::all_reduce_max(std::span<std::uint64_t> values) {
  all_reduce(values, [](std::uint64_t a, std::uint64_t b) { return std::max(a, b); });
}

void Group::all_reduce_or(std::span<std::uint64_t> values) {
  all_reduce(values, [](std::uint64_t a, std::uint64_t b) { return a | b; });
}

void Group::check_peer(int peer, Tag tag, std::size_t bytes) const {
  PAGODA_REQUIRE(peer >= 0 && peer < size_, "peer {} of group '{}' of {}", peer, name_, size_);
  PAGODA_REQUIRE_NE(peer, rank_, "a rank does not send to itself");
  PAGODA_REQUIRE_LT(tag, kTags);
  PAGODA_REQUIRE_GT(bytes, 0u, "a message has at least one byte");
}

void Group::send(int to, Tag tag, std::span<const std::byte> data) {
  const Transfer transfer = send_to(to, tag, data);
  exchange({&transfer, 1});
}

void Group::recv(int from, Tag tag, std::span<std::byte> data) {
  const Transfer transfer = receive_from(from, tag, data);
  exchange({&transfer, 1});
}

int Group::recv_any(Tag tag, std::span<std::byte> data) {
  PAGODA_REQUIRE_LT(tag, kTags);
  PAGODA_REQUIRE_GT(data.size(), 0u, "a message has at least one byte");
  const int source = guarded([&] { return do_recv_any(tag, data); });
  point_to_point_.add(0, data.size());
  return source;
}

void Group::exchange(std::span<const Transfer> transfers) {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  for (const Transfer& transfer : transfers) {
    check_peer(transfer.peer, transfer.tag, transfer.bytes());
    (transfer.sends() ? sent : received) += transfer.bytes();
  }
  PAGODA_TRACE("comm", "exchange", {"group", name_}, {"sent", sent}, {"received", received});
  guarded([&] { do_exchange(transfers); });
  point_to_point_.add(sent, received);
}

void Group::abort(std::string reason) noexcept {
  {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load(std::memory_order_relaxed)) return;
    abort_reason_ = std::move(reason);
    aborted_.store(true, std::memory_order_release);
  }
  do_abort();
}

void Group::check_alive() const {
  if (!aborted()) [[likely]]
    return;
  const std::lock_guard lock(abort_mutex_);
  throw GroupAborted(name_, abort_reason_);
}

GroupStats Group::stats() const noexcept {
  return {gather_.read(), all_to_all_.read(), broadcast_.read(), point_to_point_.read(),
          control_.read()};
}

void Group::do_all_gather(std::span<const std::byte> mine,
                          std::span<const std::span<std::byte>> parts) {
  const std::vector<std::span<const std::byte>> to(parts.size(), mine);
  Group::do_all_to_all(to, parts);
}

void Group::do_all_to_all(std::span<const std::span<const std::byte>> to,
                          std::span<const std::span<std::byte>> from) {
  std::vector<Transfer> transfers;
  transfers.reserve(2 * to.size());
  // Each rank begins with its right neighbour, so that not all of them send to rank 0 first.
  for (int step = 1; step < size_; ++step) {
    const int right = (rank_ + step) % size_;
    const int left = (rank_ + size_ - step) % size_;
    const std::span<const std::byte> out = to[static_cast<std::size_t>(right)];
    const std::span<std::byte> in = from[static_cast<std::size_t>(left)];
    if (!in.empty()) transfers.push_back(receive_from(left, kCollectiveTag, in));
    if (!out.empty()) transfers.push_back(send_to(right, kCollectiveTag, out));
  }
  if (!transfers.empty()) do_exchange(transfers);
  const auto me = static_cast<std::size_t>(rank_);
  copy_own(from[me], to[me]);
}

void Group::do_broadcast(std::span<std::byte> data, int root) {
  if (data.empty() || size_ == 1) return;
  std::vector<Transfer> transfers;
  if (rank_ != root) {
    transfers.push_back(receive_from(root, kCollectiveTag, data));
  } else {
    for (int step = 1; step < size_; ++step) {
      transfers.push_back(send_to((rank_ + step) % size_, kCollectiveTag, data));
    }
  }
  do_exchange(transfers);
}

}  // namespace pagoda::comm

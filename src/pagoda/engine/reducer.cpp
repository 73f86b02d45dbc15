// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/reducer.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Range;

constexpr Bytes kAlignment = 64;   // of every part of a message
constexpr Bytes kParking = 1_MiB;  // at a time, of a gradient that waits on disk

Bytes flag_bytes(const TrainedPage& page) {
  return align_up((page.parameters.size() + 1 + 7) / 8, kAlignment);
}

// A message's flags for a page: for each parameter, whether a gradient follows; after those,
// whether the page may be updated before step().
void set_flag(std::byte* flags, std::size_t i) {
  flags[i / 8] |= std::byte(1U << (i % 8));
}

bool flag(const std::byte* flags, std::size_t i) {
  return (flags[i / 8] & std::byte(1U << (i % 8))) != std::byte{0};
}

void write_flags(const std::vector<bool>& present, std::byte* to) {
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i]) set_flag(to, i);
  }
}

void read_flags(const std::byte* from, std::vector<bool>& present, bool& any) {
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (!flag(from, i)) continue;
    present[i] = true;
    any = true;
  }
}

bool in_backward(const Collective& rank) {
  return rank.call == Call::Backward;
}

}  // namespace

Reducer::Reducer(Groups groups, pager::Pager& pager, optim::Gradients& gradients,
                 optim::Updater& updater, EarlyUpdates& early, Options options)
    : groups_(groups),
      pager_(pager),
      gradients_(gradients),
      updater_(updater),
      early_(early),
      options_(std::move(options)),
      ranks_(groups.calls == nullptr ? 1 : groups.calls->size()),
      rank_(groups.calls == nullptr ? 0 : groups.calls->rank()),
      stream_(pager.tiers().device()->make_stream({.name = "gradients out"})),
      park_stream_(pager.tiers().device()->make_stream({.name = "park"})) {
  thread_ = std::jthread([this] {
    trace::name_thread("reduce");
    run();
  });
}

Reducer::~Reducer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Reducer::set_order(std::vector<TrainedPage*> order) {
  const Lock lock(mutex_);
  PAGODA_CHECK(rounds_.empty(), "the order of gradients changes while some are on their way");
  Plan plan = make_plan(order);
  order_ = std::move(order);
  buckets_ = std::move(plan.buckets);
  take_buffers(plan.message, lock);
}

/// Cuts the round into buckets: whole shards of small pages together, large ones in pieces.
Reducer::Plan Reducer::make_plan(std::span<TrainedPage* const> order) const {
  Plan plan;
  std::vector<Item> bucket;
  std::vector<Bytes> sizes;  // of all items
  Bytes filled = 0;
  Bytes flags = 0;
  for (TrainedPage* page : order) {
    const std::uint64_t shard = pager_.sharding().of(page->elements(), 0).size();
    const Bytes size = page->page->element_size;
    flags = std::max(flags, flag_bytes(*page));
    const std::uint64_t most = std::max<std::uint64_t>(
        pager::Sharding::kBlock, options_.bucket / (size * static_cast<Bytes>(ranks_)) /
                                     pager::Sharding::kBlock * pager::Sharding::kBlock);
    std::uint64_t done = 0;
    do {
      const std::uint64_t count = std::min(most, shard - done);
      const Bytes bytes = count * size * static_cast<Bytes>(ranks_);
      if (filled + bytes > options_.bucket && !bucket.empty()) {
        plan.buckets.push_back(std::exchange(bucket, {}));
        filled = 0;
      }
      bucket.push_back({page, done, count, done + count == shard});
      sizes.push_back(bytes);
      filled += bytes;
      done += count;
    } while (done < shard);
  }
  if (!bucket.empty()) plan.buckets.push_back(std::move(bucket));
  // One rank alone needs no messages; a GPU's gradients still need a place to arrive at.
  const bool staged = ranks_ > 1 || !pager_.tiers().device_is_host();
  if (!staged || sizes.empty()) return plan;
  // Whatever the order, a bucket is no larger than this: the buffers are taken once, at attach.
  std::sort(sizes.begin(), sizes.end());
  const Bytes data = std::max(options_.bucket, sizes.back());
  Bytes items = 0;
  Bytes sum = 0;
  for (const Bytes bytes : sizes) {
    sum += bytes;
    ++items;
    if (sum > options_.bucket) break;
  }
  const Bytes all = std::accumulate(sizes.begin(), sizes.end(), Bytes{0});
  // At least a block of elements: run_alone() takes whole blocks at a time.
  plan.message = std::max<Bytes>(
      pager::Sharding::kBlock * sizeof(float),
      std::min(data, all) + items * static_cast<Bytes>(ranks_) * (flags + kAlignment));
  return plan;
}

/// What buffers of that many bytes take: one for each way.
Bytes Reducer::buffers_for(Bytes message) const {
  const bool parks = ranks_ > 1 && !pager_.tiers().device_is_host();
  return message == 0 ? 0 : (ranks_ > 1 ? 2 : 1) * message + (parks ? kParking : 0);
}

Bytes Reducer::host_bytes(std::span<TrainedPage* const> order) const {
  const Bytes wanted = buffers_for(make_plan(order).message);
  const Bytes taken = buffers_for(buffer_bytes_);
  return wanted - std::min(wanted, taken);
}

void Reducer::take_buffers(Bytes message, const Lock& /*lock*/) {
  if (message <= buffer_bytes_) return;
  buffer_bytes_ = 0;
  outgoing_ = {};
  incoming_ = {};
  pager::HostMemory& host = pager_.tiers().host();
  outgoing_ = host.allocate(message, pager::tag::kStaging, "gradients out");
  if (ranks_ > 1) incoming_ = host.allocate(message, pager::tag::kStaging, "gradients in");
  if (ranks_ > 1 && !pager_.tiers().device_is_host() && parking_.data() == nullptr) {
    parking_ = host.allocate(kParking, pager::tag::kStaging, "parked gradients");
  }
  buffer_bytes_ = message;
}

void Reducer::begin(bool last) {
  const Lock lock(mutex_);
  if (!rounds_.empty() && !rounds_.back()->over) return;
  rounds_.push_back(std::make_unique<Round>());
  rounds_.back()->arrived.resize(order_.size());
  rounds_.back()->last = last;
  changed_.notify_all();
}

void Reducer::push(Contribution contribution) {
  const std::uint32_t number = contribution.page->number;
  const Bytes bytes = contribution.page->page->bytes();
  Lock lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
  const bool open = !rounds_.empty() && !rounds_.back()->over;
  if (open && rounds_.back()->arrived[number]) rounds_.back()->over = true;
  if (!open || rounds_.back()->over) {
    rounds_.push_back(std::make_unique<Round>());
    rounds_.back()->arrived.resize(order_.size());
  }
  Round& round = *rounds_.back();
  Arrival arrival{std::move(contribution), {}};
  bool parked = false;
  const Stopwatch watch;
  while (on_device_ > 0 && on_device_ + bytes > options_.device_limit) {
    if (wants_local_) {
      // The thread waits for a gradient that comes after this one: waiting for it would be forever.
      ++stats_.parked;
      lock.unlock();
      park(arrival);
      lock.lock();
      parked = true;
      break;
    }
    changed_.wait(lock, [&] {
      return error_ != nullptr || wants_local_ || on_device_ == 0 ||
             on_device_ + bytes <= options_.device_limit;
    });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  stats_.push_stall += watch.elapsed_ns();
  if (!parked) on_device_ += bytes;
  ++stats_.contributions;
  round.order.push_back(number);
  round.arrived[number] = std::move(arrival);
  changed_.notify_all();
}

/// Moves a contribution to the host, where it waits for its turn.
void Reducer::park(Arrival& arrival) {
  pager::Tiers& tiers = pager_.tiers();
  const TrainedPage& page = *arrival.contribution.page;
  PAGODA_TRACE("gradients", "park", {"page", page.page->name});
  arrival.parked = tiers.allocate(page.page->bytes(), pager::Placement::Auto, pager::tag::kStaging,
                                  page.page->name);
  if (arrival.contribution.ready.event != nullptr) arrival.contribution.ready.event->wait();
  if (tiers.device_is_host()) {
    tiers.write(arrival.parked, 0, {arrival.contribution.data, page.page->bytes()});
  } else {
    const bool in_memory = arrival.parked.data() != nullptr;
    const Bytes most = in_memory ? page.page->bytes() : kParking;
    const std::lock_guard parking(park_mutex_);
    for (Bytes done = 0; done < page.page->bytes();) {
      const Bytes piece = std::min(most, page.page->bytes() - done);
      std::byte* to = in_memory ? arrival.parked.data() : parking_.data();
      park_stream_->copy_async(to, arrival.contribution.data + done, piece,
                               device::Direction::DeviceToHost, page.page->name);
      park_stream_->synchronize();
      if (!in_memory) tiers.write(arrival.parked, done, {to, piece});
      done += piece;
    }
  }
  arrival.contribution.keep.reset();
  arrival.contribution.data = nullptr;
}

void Reducer::end() {
  const Lock lock(mutex_);
  if (!rounds_.empty()) rounds_.back()->over = true;
  changed_.notify_all();
}

std::vector<Collective> Reducer::meet(Collective mine) {
  announce(std::move(mine));
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !call_ || error_ != nullptr; });
  if (error_ != nullptr) std::rethrow_exception(error_);
  return met_;
}

void Reducer::announce(Collective mine) {
  const Lock lock(mutex_);
  if (!rounds_.empty()) rounds_.back()->over = true;
  call_ = std::move(mine);
  changed_.notify_all();
}

bool Reducer::met() const {
  const Lock lock(mutex_);
  return !call_ || error_ != nullptr;
}

Nanos Reducer::waiting() const noexcept {
  const Nanos since = waits_since_.load(std::memory_order_relaxed);
  return since == 0 ? 0 : now_ns() - since;
}

/// Does what needs other ranks: for so long this one waits for them.
template <class Work>
void Reducer::with_others(const Work& work) {
  waits_since_.store(now_ns(), std::memory_order_relaxed);
  work();
  waits_since_.store(0, std::memory_order_relaxed);
}

std::vector<std::uint32_t> Reducer::arrival_order() const {
  const Lock lock(mutex_);
  return arrival_order_;
}

void Reducer::fail(std::exception_ptr error) noexcept {
  const Lock lock(mutex_);
  if (error_ == nullptr) error_ = std::move(error);
  changed_.notify_all();
}

ReducerStats Reducer::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

void Reducer::run() {
  Lock lock(mutex_);
  try {
    for (;;) {
      changed_.wait(lock,
                    [&] { return stopping_ || error_ != nullptr || !rounds_.empty() || call_; });
      if (stopping_ || error_ != nullptr) return;
      if (groups_.calls == nullptr) {
        run_alone(lock);
        continue;
      }
      // A round begins where any rank has a micro-batch; a call, where none has.
      Round* round = rounds_.empty() ? nullptr : rounds_.front().get();
      const Collective mine = round != nullptr ? options_.in_backward() : *call_;
      lock.unlock();
      std::vector<Collective> all;
      with_others([&] { all = engine::exchange(*groups_.calls, mine); });
      const bool none = std::none_of(all.begin(), all.end(), in_backward);
      if (none) (void)call_of_all(all);
      lock.lock();
      if (none) {
        met_ = std::move(all);
        call_.reset();
        changed_.notify_all();
        continue;
      }
      may_begin_ = allows_early(mine, all);
      run_round(round, lock);
      if (round != nullptr) {
        if (round->order.size() >= arrival_order_.size()) arrival_order_ = round->order;
        rounds_.pop_front();
      }
      ++stats_.rounds;
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    if (error_ == nullptr && options_.on_failure) {
      // Before those who wait are told: what they do next must find the engine failed.
      lock.unlock();
      options_.on_failure(std::current_exception());
      lock.lock();
    }
    if (error_ == nullptr) error_ = std::current_exception();
    for (auto& round : rounds_) {
      for (auto& arrival : round->arrived) {
        if (arrival) release(*arrival, lock);
      }
    }
    changed_.notify_all();
  }
}

/// Whether this rank has nothing against updates that begin before step(): they use the constants
/// that the ranks with a micro-batch have.
bool Reducer::allows_early(const Collective& mine, std::span<const Collective> all) const {
  if (mine.call == Call::Backward) return true;
  if (mine.call != Call::Step && mine.call != Call::Join && mine.call != Call::Grad &&
      mine.call != Call::GradNorm) {
    return false;
  }
  return std::all_of(all.begin(), all.end(), [&](const Collective& one) {
    return one.call != Call::Backward || one.rules == mine.rules;
  });
}

/// Without other ranks, gradients are added as they come.
void Reducer::run_alone(Lock& lock) {
  if (rounds_.empty()) {
    met_ = {*call_};
    call_.reset();
    changed_.notify_all();
    return;
  }
  Round& round = *rounds_.front();
  if (round.taken == round.order.size()) {
    if (round.over) {
      if (round.order.size() >= arrival_order_.size()) arrival_order_ = round.order;
      rounds_.pop_front();
      ++stats_.rounds;
      return;
    }
    changed_.wait(lock, [&] {
      return stopping_ || error_ != nullptr || round.over || round.taken < round.order.size();
    });
    return;
  }
  Arrival& arrival = *round.arrived[round.order[round.taken++]];
  lock.unlock();
  TrainedPage& page = *arrival.contribution.page;
  early_.before_add(page);
  updater_.await_part(*page.page);
  const std::byte* direct = in_host_memory(arrival);
  std::byte* as_is = nullptr;
  if (direct != nullptr) {
    gradients_.add(page, 0, page.elements(), {&direct, 1}, arrival.contribution.present);
    gradients_.added(page, arrival.contribution.present);
  } else if ((as_is = gradients_.take_as_is(page, arrival.contribution.present)) != nullptr) {
    read_contribution(arrival, {0, page.elements()}, as_is);
    stream_->synchronize();
    gradients_.taken(page, arrival.contribution.present);
  } else {
    const Bytes size = page.page->element_size;
    const std::uint64_t most =
        buffer_bytes_ / size / pager::Sharding::kBlock * pager::Sharding::kBlock;
    for (std::uint64_t done = 0; done < page.elements();) {
      const std::uint64_t count = std::min(most, page.elements() - done);
      read_contribution(arrival, {done, done + count}, outgoing_.data());
      stream_->synchronize();
      const std::byte* staged = outgoing_.data();
      gradients_.add(page, done, count, {&staged, 1}, arrival.contribution.present);
      done += count;
    }
    gradients_.added(page, arrival.contribution.present);
  }
  if (ask(page, &round)) early_.answer(page, true);
  lock.lock();
  release(arrival, lock);
}

void Reducer::run_round(Round* round, Lock& lock) {
  for (const std::vector<Item>& bucket : buckets_) {
    if (round != nullptr) {
      const auto here = [&] {
        return std::all_of(bucket.begin(), bucket.end(), [&](const Item& item) {
          return round->arrived[item.page->number].has_value();
        });
      };
      wants_local_ = !round->over && !here();
      if (wants_local_) changed_.notify_all();
      changed_.wait(lock, [&] { return stopping_ || error_ != nullptr || round->over || here(); });
      wants_local_ = false;
      if (error_ != nullptr) std::rethrow_exception(error_);
      PAGODA_CHECK(!stopping_, "the engine ends while gradients are on their way");
    }
    lock.unlock();
    exchange(bucket, round);
    lock.lock();
    if (round == nullptr) continue;
    for (const Item& item : bucket) {
      auto& arrival = round->arrived[item.page->number];
      if (item.last && arrival) release(*arrival, lock);
    }
  }
}

Range Reducer::part(const Item& item, int rank) const {
  const Range shard = pager_.sharding().of(item.page->elements(), rank);
  const std::uint64_t begin = std::min(shard.end, shard.begin + item.begin);
  return {begin, std::min(shard.end, begin + item.count)};
}

Bytes Reducer::message_bytes(std::span<const Item> bucket, int rank) const {
  Bytes sum = 0;
  for (const Item& item : bucket) {
    sum += flag_bytes(*item.page) +
           align_up(part(item, rank).size() * item.page->page->element_size, kAlignment);
  }
  return sum;
}

void Reducer::exchange(std::span<const Item> bucket, Round* round) {
  PAGODA_TRACE("gradients", "exchange", {"items", bucket.size()});
  const auto ranks = static_cast<std::size_t>(ranks_);
  std::vector<std::span<const std::byte>> to(ranks);
  std::vector<std::span<std::byte>> from(ranks);
  std::byte* out = outgoing_.data();
  std::byte* in = incoming_.data();
  const Bytes own_bytes = message_bytes(bucket, rank_);
  const std::byte* own = nullptr;
  Bytes sent = 0;
  std::vector<bool> early(bucket.size());  // may be updated as soon as it is added up
  for (std::size_t i = 0; i < bucket.size(); ++i) {
    early[i] = bucket[i].last && ask(*bucket[i].page, round);
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto rank = static_cast<int>(r);
    const std::byte* begin = out;
    for (std::size_t i = 0; i < bucket.size(); ++i) {
      const Item& item = bucket[i];
      const TrainedPage& page = *item.page;
      const Range range = part(item, rank);
      const Bytes bytes = range.size() * page.page->element_size;
      std::memset(out, 0, flag_bytes(page));
      if (early[i]) set_flag(out, page.parameters.size());
      std::byte* data = out + flag_bytes(page);
      const auto* arrival = round == nullptr ? nullptr : &round->arrived[page.number];
      if (arrival != nullptr && arrival->has_value()) {
        write_flags((*arrival)->contribution.present, out);
        read_contribution(**arrival, range, data);
      } else {
        std::memset(data, 0, bytes);
      }
      out = data + align_up(bytes, kAlignment);
    }
    const std::span message(begin, static_cast<std::size_t>(out - begin));
    if (rank == rank_) {
      own = begin;
      continue;  // stays where it is
    }
    to[r] = message;
    sent += message.size();
    from[r] = {in, own_bytes};
    in += own_bytes;
  }
  stream_->synchronize();
  with_others([&] { groups_.gradients->all_to_all(to, from); });

  std::vector<const std::byte*> messages(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    messages[r] = static_cast<int>(r) == rank_ ? own : from[r].data();
  }
  std::vector<const std::byte*> parts(ranks);
  Bytes at = 0;
  for (std::size_t i = 0; i < bucket.size(); ++i) {
    const Item& item = bucket[i];
    TrainedPage& page = *item.page;
    const Range range = part(item, rank_);
    std::vector<bool> present(page.parameters.size());
    bool any = false;
    bool all_early = true;
    for (std::size_t r = 0; r < ranks; ++r) {
      bool has = false;
      all_early = all_early && flag(messages[r] + at, page.parameters.size());
      read_flags(messages[r] + at, present, has);
      parts[r] = has ? messages[r] + at + flag_bytes(page) : nullptr;
      any = any || has;
    }
    if (any) {
      early_.before_add(page);
      updater_.await_part(*page.page);
      if (!range.empty()) gradients_.add(page, range.begin, range.size(), parts, present);
      if (item.last) gradients_.added(page, present);
    }
    if (early[i]) early_.answer(page, all_early && page.filled());
    at += flag_bytes(page) + align_up(range.size() * page.page->element_size, kAlignment);
  }
  const Lock lock(mutex_);
  stats_.exchanged += sent;
}

/// Whether this rank has nothing against an update of the page at the end of this round.
bool Reducer::ask(TrainedPage& page, const Round* round) {
  if (!may_begin_ || (round != nullptr && !round->last)) return false;
  return early_.ask(page, round != nullptr && round->arrived[page.number].has_value());
}

const std::byte* Reducer::in_host_memory(const Arrival& arrival) const {
  if (arrival.parked) return arrival.parked.data();
  return pager_.tiers().device_is_host() ? arrival.contribution.data : nullptr;
}

/// Starts to copy elements of a contribution to host memory; complete after stream_->synchronize().
void Reducer::read_contribution(const Arrival& arrival, Range range, std::byte* to) {
  const Bytes size = arrival.contribution.page->page->element_size;
  if (range.empty()) return;
  if (arrival.parked) {
    pager_.tiers().read(arrival.parked, range.begin * size, {to, range.size() * size});
    return;
  }
  if (arrival.contribution.ready.event != nullptr) stream_->wait(*arrival.contribution.ready.event);
  stream_->copy_async(to, arrival.contribution.data + range.begin * size, range.size() * size,
                      device::Direction::DeviceToHost, arrival.contribution.page->page->name);
  const Lock lock(mutex_);
  stats_.device_to_host += range.size() * size;
}

void Reducer::release(Arrival& arrival, const Lock& /*lock*/) {
  if (arrival.contribution.keep != nullptr || arrival.contribution.data != nullptr) {
    on_device_ -= arrival.contribution.page->page->bytes();
  }
  arrival.contribution.keep.reset();
  arrival.contribution.data = nullptr;
  arrival.parked = {};
  changed_.notify_all();
}

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/reducer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/first_error.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Range;

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

/// Which parameters the contribution has a gradient of, those left out that are frozen.
std::vector<bool> trained_ones(const Contribution& contribution) {
  std::vector<bool> out = contribution.present;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (contribution.page->parameters[i].frozen) out[i] = false;
  }
  return out;
}

bool is_trained(const Contribution& contribution) {
  const std::vector<bool> trained = trained_ones(contribution);
  return std::find(trained.begin(), trained.end(), true) != trained.end();
}

bool in_backward(const Collective& rank) {
  return rank.call == Call::Backward;
}

}  // namespace

Reducer::Reducer(Groups groups, pager::Pager& pager, optim::Gradients& gradients,
                 optim::Updater& updater, EarlyUpdates& early, FrozenParameters& frozen,
                 Options options)
    : groups_(groups),
      pager_(pager),
      gradients_(gradients),
      updater_(updater),
      early_(early),
      frozen_(frozen),
      options_(std::move(options)),
      ranks_(groups.calls == nullptr ? 1 : groups.calls->size()),
      rank_(groups.calls == nullptr ? 0 : groups.calls->rank()),
      stream_(pager.tiers().device()->make_stream({.name = "gradients out"})),
      park_stream_(pager.tiers().device()->make_stream({.name = "park"})) {
  if (const Bytes parking = parking_bytes(pager.tiers().device()->kind(), ranks_); parking > 0) {
    parking_ = pager.tiers().host().allocate(parking, pager::tag::kStaging, "parked gradients");
  }
  thread_ = start_thread<std::jthread>([this] {
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

void Reducer::set_pages(std::size_t count) {
  const Lock lock(mutex_);
  pages_ = count;
  arrival_order_.clear();
}

void Reducer::set_order(std::vector<TrainedPage*> order) {
  const Lock lock(mutex_);
  PAGODA_CHECK(rounds_.empty(), "the order of gradients changes while some are on their way");
  order_ = std::move(order);
  if (order_.empty()) buffers_ = {};  // a model that goes, or is not attached, leaves nothing
  use_plan(make_plan(order_), lock);
}

void Reducer::begin(bool last) {
  const Lock lock(mutex_);
  if (!rounds_.empty()) rounds_.back()->over = true;
  new_round(lock).last = last;
}

Reducer::Round& Reducer::new_round(const Lock& /*lock*/) {
  Round& round = *rounds_.emplace_back(std::make_shared<Round>());
  round.arrived.resize(pages_);
  round.thawed = frozen_.thawed();
  changed_.notify_all();
  return round;
}

void Reducer::push(Contribution contribution) {
  require_may_wait();
  const std::uint32_t number = contribution.page->number;
  const Bytes bytes = contribution.page->page->bytes();
  // Before the lock, and gone after it: what they keep may be torch's.
  Arrival arrival{std::move(contribution), {}};
  std::shared_ptr<Round> round;
  Lock lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (!rounds_.empty() && !rounds_.back()->over) {
    // The page's next micro-batch, or one that has thawed something since a pass that failed.
    Round& last = *rounds_.back();
    last.over = last.arrived[number].has_value() || last.thawed != frozen_.thawed();
  }
  if (rounds_.empty() || rounds_.back()->over) new_round(lock);
  // It may be over and gone while this waits, where nobody adds the contribution up.
  round = rounds_.back();
  const auto refused = [&] {
    return round->ended || (round->opened && !is_trained(arrival.contribution));
  };
  const bool large = is_large(arrival.contribution);
  const Stopwatch watch;
  while (!refused() && !has_room_for(arrival.contribution, lock)) {
    if (wants_local_) {
      // The thread waits for a gradient that comes after this one: waiting for it would be forever.
      park(arrival, lock);
      break;
    }
    changed_.wait(lock, [&] {
      return error_ != nullptr || wants_local_ || has_room_for(arrival.contribution, lock) ||
             refused();
    });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  // Other ranks may be late, and it shall not wait for them where it is.
  if (large && ranks_ > 1 && !refused() && !arrival.parked) park(arrival, lock);
  stats_.push_stall += watch.elapsed_ns();
  if (refused()) {
    if (arrival.parked) (void)release(arrival, lock);
    return;
  }
  if (!arrival.parked) on_device_ += bytes;
  ++stats_.contributions;
  if (large) ++stats_.large;
  round->order.push_back(number);
  std::optional<Arrival>& place = round->arrived[number];
  place = std::move(arrival);
  changed_.notify_all();
  if (!large || place->parked) return;
  const Stopwatch leaving;
  changed_.wait(lock, [&] {
    return error_ != nullptr || stopping_ || round->ended || !place ||
           place->contribution.data == nullptr;
  });
  stats_.push_stall += leaving.elapsed_ns();
  if (error_ != nullptr) std::rethrow_exception(error_);
}

bool Reducer::is_large(const Contribution& contribution) const noexcept {
  return contribution.page->page->bytes() > options_.device_limit;
}

/// Whether it may wait for its turn: on the device, or, if it is larger than what may, on the host
/// where there are other ranks.
bool Reducer::has_room_for(const Contribution& contribution, const Lock& /*lock*/) const noexcept {
  if (is_large(contribution)) return ranks_ > 1 ? large_parked_ == 0 : on_device_ == 0;
  return on_device_ + contribution.page->page->bytes() <= options_.device_limit;
}

/// The lock is open meanwhile.
void Reducer::park(Arrival& arrival, Lock& lock) {
  const bool large = is_large(arrival.contribution);
  ++stats_.parked;
  if (large) ++large_parked_;
  lock.unlock();
  try {
    move_to_host(arrival);
  } catch (...) {
    lock.lock();
    if (large) --large_parked_;
    changed_.notify_all();
    throw;
  }
  lock.lock();
}

/// Moves a contribution to the host, where it waits for its turn.
void Reducer::move_to_host(Arrival& arrival) {
  pager::Tiers& tiers = pager_.tiers();
  const TrainedPage& page = *arrival.contribution.page;
  PAGODA_TRACE("gradients", "park", {"page", page.page->name()});
  arrival.parked = tiers.allocate(page.page->bytes(), pager::Placement::Auto, pager::tag::kStaging,
                                  page.page->name());
  if (arrival.contribution.ready.event != nullptr) arrival.contribution.ready.event->wait();
  if (tiers.device_is_host()) {
    tiers.write(arrival.parked, 0, {arrival.contribution.data, page.page->bytes()});
  } else {
    const bool in_memory = arrival.parked.data() != nullptr;
    const Bytes most =
        in_memory ? page.page->bytes() : parking_bytes(tiers.device()->kind(), ranks_);
    const std::lock_guard parking(park_mutex_);
    for (Bytes done = 0; done < page.page->bytes();) {
      const Bytes piece = std::min(most, page.page->bytes() - done);
      std::byte* to = in_memory ? arrival.parked.data() : parking_.data();
      park_stream_->copy_async(to, arrival.contribution.data + done, piece,
                               device::Direction::DeviceToHost, page.page->name());
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

bool Reducer::thaw_news() const {
  const Lock lock(mutex_);
  return thaw_news_;
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
      Collective mine = round != nullptr ? options_.in_backward() : *call_;
      mine.thawed = round != nullptr ? !round->thawed.empty() : frozen_.news();
      lock.unlock();
      std::vector<Collective> all = engine::exchange(*groups_.calls, mine);
      const bool none = std::none_of(all.begin(), all.end(), in_backward);
      if (none) (void)call_of_all(all);
      const bool thawed =
          std::any_of(all.begin(), all.end(), [](const Collective& one) { return one.thawed; });
      // Where ranks have written to different parameters step() may be refused, and they to write.
      const bool apart = std::any_of(all.begin(), all.end(), [&](const Collective& one) {
        return one.writes != all[0].writes;
      });
      lock.lock();
      if (none) {
        thaw_news_ = thawed;
        met_ = std::move(all);
        call_.reset();
        changed_.notify_all();
        continue;
      }
      may_begin_ = !apart && allows_early(mine, all);
      open(round, thawed, lock);
      run_round(round, lock);
      if (round != nullptr) end_round(lock);
      ++stats_.rounds;
    }
  } catch (...) {
    keep_first_error(error_, options_.on_failure, lock);
    Kept dropped;
    for (auto& round : rounds_) {
      for (auto& arrival : round->arrived) {
        if (arrival) dropped.push_back(release(*arrival, lock));
      }
    }
    changed_.notify_all();
    lock.unlock();  // what was kept goes without it
  }
}

/// Gradients may be added up, and those of what is not trained are dropped.
void Reducer::open(Round* round, bool thawed, Lock& lock) {
  Kept dropped = thawed ? admit(round, lock) : Kept{};
  if (round != nullptr) {
    round->opened = true;
    changed_.notify_all();
  }
  if (dropped.empty()) return;
  lock.unlock();
  dropped.clear();
  lock.lock();
}

/// The first round is over.
void Reducer::end_round(Lock& lock) {
  std::shared_ptr<Round> over = std::move(rounds_.front());
  rounds_.pop_front();
  over->ended = true;
  if (over->order.size() >= arrival_order_.size()) arrival_order_ = over->order;
  Kept unwanted;
  for (auto& arrival : over->arrived) {
    if (arrival && (arrival->parked || arrival->contribution.data != nullptr)) {
      unwanted.push_back(release(*arrival, lock));
    }
  }
  changed_.notify_all();
  lock.unlock();
  unwanted.clear();
  over.reset();
  lock.lock();
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

/// What is thawed on any rank is part of rounds from this one on, if all ranks have room for it.
/// Gradients of what is not are returned, to be dropped without the lock.
Reducer::Kept Reducer::admit(Round* round, Lock& lock) {
  const FrozenSet thawed = round != nullptr ? round->thawed : FrozenSet{};
  lock.unlock();
  const std::vector<TrainedPage*> joined =
      frozen_.admit(thawed, FrozenParameters::Asking::Round, groups_.calls);
  lock.lock();
  order_.insert(order_.end(), joined.begin(), joined.end());
  use_plan(make_plan(order_), lock);
  Kept out;
  if (round == nullptr) return out;
  for (auto& arrival : round->arrived) {
    if (!arrival || is_trained(arrival->contribution)) continue;
    out.push_back(release(*arrival, lock));
    arrival.reset();
  }
  return out;
}

/// Without other ranks, gradients are added as they come.
void Reducer::run_alone(Lock& lock) {
  if (rounds_.empty()) {
    thaw_news_ = frozen_.news();
    met_ = {*call_};
    call_.reset();
    changed_.notify_all();
    return;
  }
  Round& round = *rounds_.front();
  if (!round.opened) {
    open(&round, !round.thawed.empty(), lock);
  }
  if (round.taken == round.order.size()) {
    if (round.over) {
      ++stats_.rounds;
      end_round(lock);
      return;
    }
    changed_.wait(lock, [&] {
      return stopping_ || error_ != nullptr || round.over || round.taken < round.order.size();
    });
    return;
  }
  auto& arrived = round.arrived[round.order[round.taken++]];
  if (!arrived) return;  // dropped
  Arrival& arrival = *arrived;
  lock.unlock();
  TrainedPage& page = *arrival.contribution.page;
  arrival.contribution.present = trained_ones(arrival.contribution);
  early_.before_add(page);
  updater_.wait_for_shard(*page.page);
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
        buffers_.message / size / pager::Sharding::kBlock * pager::Sharding::kBlock;
    for (std::uint64_t done = 0; done < page.elements();) {
      const std::uint64_t count = std::min(most, page.elements() - done);
      read_contribution(arrival, {done, done + count}, buffers_.outgoing.data());
      stream_->synchronize();
      const std::byte* staged = buffers_.outgoing.data();
      gradients_.add(page, done, count, {&staged, 1}, arrival.contribution.present);
      done += count;
    }
    gradients_.added(page, arrival.contribution.present);
  }
  if (ask(page, &round)) early_.answer(page, true);
  arrival.contribution.keep.reset();
  lock.lock();
  (void)release(arrival, lock);
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
    Kept done;
    lock.lock();
    if (round == nullptr) continue;
    for (const Item& item : bucket) {
      auto& arrival = round->arrived[item.page->number];
      if (item.last && arrival) done.push_back(release(*arrival, lock));
    }
    lock.unlock();
    done.clear();
    lock.lock();
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
  std::byte* out = buffers_.outgoing.data();
  std::byte* in = buffers_.incoming.data();
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
        write_flags(trained_ones((*arrival)->contribution), out);
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
  groups_.gradients->all_to_all(to, from);

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
      updater_.wait_for_shard(*page.page);
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
  if (!may_begin_ || page.joining || (round != nullptr && !round->last)) return false;
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
                      device::Direction::DeviceToHost, arrival.contribution.page->page->name());
  const Lock lock(mutex_);
  stats_.device_to_host += range.size() * size;
}

/// Of the result the last reference may be Python's: it goes without the lock.
std::shared_ptr<void> Reducer::release(Arrival& arrival, const Lock& /*lock*/) {
  if (arrival.contribution.data != nullptr) on_device_ -= arrival.contribution.page->page->bytes();
  if (arrival.parked && is_large(arrival.contribution)) --large_parked_;
  arrival.contribution.data = nullptr;
  arrival.parked = {};
  changed_.notify_all();
  return std::move(arrival.contribution.keep);
}

}  // namespace pagoda::engine

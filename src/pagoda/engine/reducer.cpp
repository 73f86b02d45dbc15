// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/reducer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/trace.h"

namespace pagoda::engine {
namespace {

using optim::TrainedPage;
using pager::Range;

constexpr Bytes kAlignment = 64;  // of every part of a message

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

/// A gradient for a page whose update has begun: it fired its hook more often than ever before.
void check_not_begun(const TrainedPage& page) {
  if (!page.begun) return;
  throw UserError(
      fmt::format("parameter '{}' got another gradient after its update had begun; set "
                  "early_updates to false for a model whose passes differ so",
                  page.page->name));
}

}  // namespace

Reducer::Reducer(comm::Group* group, pager::Pager& pager, optim::Gradients& gradients,
                 optim::Updater& updater, EarlyUpdates& early, FrozenParameters& frozen,
                 Options options)
    : group_(group),
      pager_(pager),
      gradients_(gradients),
      updater_(updater),
      early_(early),
      frozen_(frozen),
      options_(options),
      ranks_(group == nullptr ? 1 : group->size()),
      rank_(group == nullptr ? 0 : group->rank()),
      stream_(pager.tiers().device()->make_stream({.name = "gradients out"})) {
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

void Reducer::set_pages(std::size_t count) {
  const Lock lock(mutex_);
  pages_ = count;
  arrival_order_.clear();
}

void Reducer::set_order(std::vector<TrainedPage*> order) {
  const Lock lock(mutex_);
  PAGODA_CHECK(rounds_.empty(), "the order of gradients changes while some are on their way");
  order_ = std::move(order);
  plan_buckets(lock);
}

void Reducer::make_room_for(std::span<TrainedPage* const> pages) {
  const Lock lock(mutex_);
  std::vector<TrainedPage*> all = order_;
  all.insert(all.end(), pages.begin(), pages.end());
  const Bytes bytes = plan(all).bytes;
  if (bytes > std::max(buffers_.bytes, next_buffers_.bytes)) next_buffers_ = take_buffers(bytes);
}

void Reducer::plan_buckets(const Lock& /*lock*/) {
  Plan now = plan(order_);
  buckets_ = std::move(now.buckets);
  Buffers next = std::exchange(next_buffers_, {});
  if (now.bytes <= buffers_.bytes) return;
  buffers_ = {};
  buffers_ = next.bytes >= now.bytes ? std::move(next) : take_buffers(now.bytes);
}

Reducer::Buffers Reducer::take_buffers(Bytes bytes) const {
  pager::HostMemory& host = pager_.tiers().host();
  Buffers out;
  out.outgoing = host.allocate(bytes, pager::tag::kStaging, "gradients out");
  if (ranks_ > 1) out.incoming = host.allocate(bytes, pager::tag::kStaging, "gradients in");
  out.bytes = bytes;
  return out;
}

/// Cuts the round into buckets: whole shards of small pages together, large ones in pieces.
Reducer::Plan Reducer::plan(std::span<TrainedPage* const> order) const {
  Plan out;
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
        out.buckets.push_back(std::exchange(bucket, {}));
        filled = 0;
      }
      bucket.push_back({page, done, count, done + count == shard});
      sizes.push_back(bytes);
      filled += bytes;
      done += count;
    } while (done < shard);
  }
  if (!bucket.empty()) out.buckets.push_back(std::move(bucket));
  // One rank alone needs no messages; a GPU's gradients still need a place to arrive at.
  const bool staged = ranks_ > 1 || !pager_.tiers().device_is_host();
  if (!staged || sizes.empty()) return out;
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
  out.bytes = std::max<Bytes>(
      pager::Sharding::kBlock * sizeof(float),
      std::min(data, all) + items * static_cast<Bytes>(ranks_) * (flags + kAlignment));
  return out;
}

void Reducer::begin(bool last) {
  const Lock lock(mutex_);
  if (!rounds_.empty() && !rounds_.back()->over) {
    // Of a pass that failed; the ranks may have heard already what was thawed then.
    if (rounds_.back()->thawed == frozen_.thawed()) return;
    rounds_.back()->over = true;
  }
  new_round(lock).last = last;
  changed_.notify_all();
}

Reducer::Round& Reducer::new_round(const Lock& /*lock*/) {
  Round& round = *rounds_.emplace_back(std::make_unique<Round>());
  round.arrived.resize(pages_);
  round.thawed = frozen_.thawed();
  return round;
}

void Reducer::push(Contribution contribution) {
  const std::uint32_t number = contribution.page->number;
  const Bytes bytes = contribution.page->page->bytes();
  Lock lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
  const bool open = !rounds_.empty() && !rounds_.back()->over;
  if (open && rounds_.back()->arrived[number]) rounds_.back()->over = true;
  Round& round = !open || rounds_.back()->over ? new_round(lock) : *rounds_.back();
  const auto refused = [&round](const Contribution& one) {  // and nobody adds it up
    return round.opened && !is_trained(one);
  };
  if (refused(contribution)) return;
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
  if (refused(arrival.contribution)) return;  // while it waited
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
    std::vector<std::byte> bytes(page.page->bytes());
    const auto stream = tiers.device()->make_stream({.name = "park"});
    stream->copy_async(bytes.data(), arrival.contribution.data, bytes.size(),
                       device::Direction::DeviceToHost, page.page->name);
    stream->synchronize();
    tiers.write(arrival.parked, 0, bytes);
  }
  arrival.contribution.keep.reset();
  arrival.contribution.data = nullptr;
}

void Reducer::end() {
  const Lock lock(mutex_);
  if (!rounds_.empty()) rounds_.back()->over = true;
  changed_.notify_all();
}

void Reducer::finish() {
  Lock lock(mutex_);
  if (!rounds_.empty()) rounds_.back()->over = true;
  finishing_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !finishing_ || error_ != nullptr; });
  if (error_ != nullptr) std::rethrow_exception(error_);
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
      changed_.wait(
          lock, [&] { return stopping_ || error_ != nullptr || !rounds_.empty() || finishing_; });
      if (stopping_ || error_ != nullptr) return;
      if (group_ == nullptr) {
        run_alone(lock);
        continue;
      }
      // A round begins where any rank has a micro-batch; the step, where none has.
      Round* round = rounds_.empty() ? nullptr : rounds_.front().get();
      const bool news = round != nullptr ? !round->thawed.empty() : frozen_.news();
      lock.unlock();
      std::array<std::uint64_t, 2> said = {round != nullptr ? 1U : 0U, news ? 1U : 0U};
      group_->all_reduce_max(said);
      lock.lock();
      if (said[0] == 0) {
        thaw_news_ = said[1] != 0;
        finishing_ = false;
        changed_.notify_all();
        continue;
      }
      if (said[1] != 0) admit(round, lock);
      if (round != nullptr) round->opened = true;
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

/// What is thawed on any rank is part of rounds from this one on, if all ranks have room for it.
/// Gradients of what is not are dropped.
void Reducer::admit(Round* round, Lock& lock) {
  const FrozenSet thawed = round != nullptr ? round->thawed : FrozenSet{};
  lock.unlock();
  const std::vector<TrainedPage*> joined =
      frozen_.admit(thawed, FrozenParameters::Asking::Round, group_,
                    [this](std::span<TrainedPage* const> pages) { make_room_for(pages); });
  lock.lock();
  order_.insert(order_.end(), joined.begin(), joined.end());
  plan_buckets(lock);
  if (round == nullptr) return;
  for (auto& arrival : round->arrived) {
    if (!arrival || is_trained(arrival->contribution)) continue;
    release(*arrival, lock);
    arrival.reset();
  }
}

/// Without other ranks, gradients are added as they come.
void Reducer::run_alone(Lock& lock) {
  if (rounds_.empty()) {
    thaw_news_ = frozen_.news();
    finishing_ = false;
    changed_.notify_all();
    return;
  }
  Round& round = *rounds_.front();
  if (!round.opened) {
    if (!round.thawed.empty()) admit(&round, lock);
    round.opened = true;
  }
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
  auto& arrived = round.arrived[round.order[round.taken++]];
  if (!arrived) return;  // dropped
  Arrival& arrival = *arrived;
  lock.unlock();
  TrainedPage& page = *arrival.contribution.page;
  arrival.contribution.present = trained_ones(arrival.contribution);
  check_not_begun(page);
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
        buffers_.bytes / size / pager::Sharding::kBlock * pager::Sharding::kBlock;
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
  group_->all_to_all(to, from);

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
      check_not_begun(page);
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
  if (page.joining || (round != nullptr && !round->last)) return false;
  return !page.begun &&
         early_.ask(page, round != nullptr && round->arrived[page.number].has_value());
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

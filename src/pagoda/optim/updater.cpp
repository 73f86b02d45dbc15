// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/updater.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"

namespace pagoda::optim {
namespace {

using kernels::Dtype;
using pager::Tier;

/// Elements whose state is whole blocks of a disk, however few bytes each has.
constexpr std::uint64_t kWholeBlocks = io::ExtentAllocator::kLargeAlignment;

/// Runs `fn`; its error says which page it was about.
template <class Fn>
void naming_page(const TrainedPage& page, Fn&& fn) {
  try {
    fn();
  } catch (Error& error) {
    error.add_context(context("page", page.page->name()));
    throw;
  }
}

/// What of `all` is in none of the holes, which ascend.
std::vector<pager::Range> without(pager::Range all, std::span<const pager::Range> holes) {
  std::vector<pager::Range> out;
  std::uint64_t at = all.begin;
  for (auto hole = std::partition_point(holes.begin(), holes.end(),
                                        [&](const auto& h) { return h.end <= all.begin; });
       hole != holes.end() && hole->begin < all.end; ++hole) {
    if (hole->begin > at) out.push_back({at, hole->begin});
    at = std::min(hole->end, all.end);
  }
  if (at < all.end) out.push_back({at, all.end});
  return out;
}

}  // namespace

/// What has become of a page's update. Early ones are those that begin before their step(); what
/// they cost is in brackets.
enum class Updater::Stage : std::uint8_t {
  Idle,      ///< there is none
  Waiting,   ///< in the queue: nothing has been computed
  Running,   ///< chunks of it are under way
  Computed,  ///< early: waits for step() [the gradient, or TrainedPage::next and ::spare]
};

/// Which elements of an update under way can be read before all of it is published.
enum class Updater::Parts : std::uint8_t {
  Open,   ///< none; whoever asks first has some go before the others
  Asked,  ///< the thread will make, or makes, Record::asked
  Made,   ///< Record::made, and no others go first
  Whole,  ///< none, and none goes first: masters are made chunk by chunk
  All,    ///< every chunk has been computed: nothing may be made a second time
};

/// A trained page as the updater knows it. Guarded by mutex_, but for what is said to be the
/// thread's.
struct Updater::Record {
  TrainedPage* page;
  StateLayout layout;
  Stage stage = Stage::Idle;
  std::uint64_t done = 0;               // updates this rank's part has seen
  std::uint64_t target = 0;             // …must see
  std::size_t place = ~std::size_t{0};  // in the order to follow
  bool urgent = false;                  // somebody waits for it
  // Of the update under way. The first two are fixed while chunks of it are.
  bool early = false;        // writes parameters to `next`, which step() publishes
  bool reversible = false;   // …and state to the spare
  bool released = true;      // step() has asked for it
  bool rolled_back = false;  // its rest is left out
  bool copies = false;       // all is computed, and goes to the page's home
  const pager::Home* next = nullptr;
  std::shared_ptr<const StepScalars> step;
  std::uint64_t chunks_left = 0;  // the thread's
  std::uint64_t computed = 0;     // chunks of the update under way: the thread's
  bool in_place = false;          // nothing of it passes through buffers
  unsigned waiting = 0;           // for it, in wait_for_shard()
  bool removed = false;           // …in vain
  Parts parts = Parts::Open;
  /// Elements that go before the others of their page, in ascending order.
  std::vector<pager::Range> asked;
  std::vector<pager::Range> made;  // the thread's, which writes it under mutex_

  std::uint64_t chunks() const noexcept { return layout.chunks(page->updated.size()); }
  UpdateChunk::Written written() const noexcept { return {reversible, early ? next : nullptr}; }
};

/// A chunk on its way. One is used again when its last chunk has been written.
struct Updater::Slot {
  Slot(pager::Tiers& tiers, pager::HostBlock buffer) : chunk(tiers, std::move(buffer)) {}

  UpdateChunk chunk;
  Record* record = nullptr;
};

Updater::Updater(pager::Pager& pager, ThreadPool& pool, Options options)
    : pager_(pager), pool_(pool), options_(options) {
  PAGODA_REQUIRE_EQ(options_.chunk % pager::Sharding::kBlock, 0U,
                    "update_chunk must be a multiple of {} elements", pager::Sharding::kBlock);
  PAGODA_REQUIRE_GE(options_.buffers, 2U, "update_buffers must be at least 2");
  const Bytes bytes = UpdateChunk::buffer_bytes(options_.chunk);
  const Bytes most = pager_.tiers().budget(Tier::Host).limit() / 8;
  for (unsigned i = 0; i < options_.buffers && (i < kLeastBuffers || (i + 1) * bytes <= most);
       ++i) {
    pager::HostBlock buffer;
    if (!pager_.tiers().all_in_place()) {
      buffer = pager_.tiers().host().allocate(bytes, pager::tag::kStaging, "update buffer");
    }
    slots_.push_back(std::make_unique<Slot>(pager_.tiers(), std::move(buffer)));
    free_.push_back(slots_.back().get());
  }
  thread_ = std::jthread([this] {
    trace::name_thread("update");
    run();
  });
}

Updater::~Updater() {
  stop();
}

void Updater::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Updater::set_callbacks(Finished finished, Writing writing, Writing holding) {
  const std::lock_guard lock(mutex_);
  before_write_ = std::move(writing);
  before_hold_ = std::move(holding);
  finished_ = std::move(finished);
}

StateLayout Updater::layout(const TrainedPage& page, const Optimizer& optimizer) const {
  StateLayout out;
  out.momentum = has_momentum(optimizer);
  out.variance = has_variance(optimizer);
  out.moments = options_.moments;
  out.chunk = options_.chunk;
  out.master = page.dtype == Dtype::F32                    ? StateLayout::Master::Parameter
               : page.dtype == Dtype::BF16 && out.variance ? options_.master16
                                                           : StateLayout::Master::Whole;
  return out;
}

/// Bytes of an element that pass through buffers.
Bytes Updater::buffered_bytes(const TrainedPage& page, const StateLayout& layout) const {
  const pager::Tiers& tiers = pager_.tiers();
  Bytes out = 0;
  if (!tiers.in_place(page.state)) out += layout.element_bytes();
  if (!tiers.in_place(page.gradient)) out += kernels::element_size(page.gradient_dtype);
  if (!tiers.in_place(page.home())) out += page.page->element_size;
  return out;
}

void Updater::add(TrainedPage& page, const Optimizer& optimizer) {
  auto record = std::make_unique<Record>();
  record->page = &page;
  record->layout = layout(page, optimizer);
  // Where nothing passes through buffers their size need not count; where little of an element
  // does, a buffer holds more of them. (Larger chunks have less padding: the state's home is large
  // enough.)
  const Bytes buffered = buffered_bytes(page, record->layout);
  record->in_place = buffered == 0;
  const std::uint64_t more =
      record->in_place
          ? options_.chunk_in_memory
          : align_down(UpdateChunk::buffer_bytes(options_.chunk) / buffered, kWholeBlocks);
  record->layout.chunk = std::max(record->layout.chunk, more);
  PAGODA_CHECK_LE(record->layout.bytes(page.updated.size()), page.state.size());
  const std::uint64_t version = pager_.look(*page.page).version;
  const std::lock_guard lock(mutex_);
  record->done = record->target = version;
  records_[page.page] = std::move(record);
}

/// Where an early update of the page leaves its parameters; null: nowhere, so there is none.
const pager::Home* Updater::early_home(const TrainedPage& page, bool reversible) const noexcept {
  if (page.updated.empty()) return &page.gradient;  // nothing is this rank's to write
  const bool over_gradient =
      !reversible && page.gradient_dtype == page.dtype && page.gradient_range == page.updated;
  const pager::Home& next = page.next || !over_gradient ? page.next : page.gradient;
  if (!next || (reversible && !page.spare)) return nullptr;
  return exchanges(page, next) || pager_.tiers().in_place(next) ? &next : nullptr;
}

/// Whether what is in `next` becomes the page's home by changing places with it.
bool Updater::exchanges(const TrainedPage& page, const pager::Home& next) const noexcept {
  const pager::Home& home = page.home();
  return !pager_.look(*page.page).fixed && page.home_range() == page.updated &&
         home.tier() == next.tier() && home.size() == next.size();
}

std::optional<Updater::EarlyBytes> Updater::early_bytes(const TrainedPage& page,
                                                        bool reversible) const {
  const std::lock_guard lock(mutex_);
  const Record& record = *records_.at(page.page);
  // Of a page with several parameters, what an update leaves out would have to be copied.
  if (!page.one_parameter() || (reversible && !record.in_place)) return std::nullopt;
  if (early_home(page, reversible) != nullptr) return EarlyBytes{};
  return EarlyBytes{reversible ? page.state.size() : 0,
                    page.updated.size() * page.page->element_size};
}

void Updater::remove(TrainedPage& page) {
  std::unique_lock lock(mutex_);
  const auto found = records_.find(page.page);
  if (found == records_.end()) return;
  Record& record = *found->second;
  changed_.wait(lock, [&] { return pending_ == 0 || error_ != nullptr; });
  record.removed = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return record.waiting == 0; });
  records_.erase(page.page);
}

void Updater::start(std::span<TrainedPage* const> order,
                    std::shared_ptr<const StepScalars> scalars) {
  const std::lock_guard lock(mutex_);
  for (TrainedPage* page : order) {
    Record& record = *records_.at(page->page);
    PAGODA_CHECK(record.stage == Stage::Idle, "a page has two pending updates (page {})",
                 page->page->name());
    ++record.target;
    enqueue(record, scalars);
  }
  changed_.notify_all();
}

bool Updater::may_start_early(const TrainedPage& page, bool reversible) const {
  const std::lock_guard lock(mutex_);
  // The first update makes the master from the parameter, and reads what others only write.
  return records_.at(page.page)->stage == Stage::Idle && !page.state_blank &&
         page.one_parameter() && early_home(page, reversible) != nullptr;
}

void Updater::start_early(TrainedPage& page, std::shared_ptr<const StepScalars> scalars,
                          bool reversible) {
  const std::lock_guard lock(mutex_);
  Record& record = *records_.at(page.page);
  PAGODA_CHECK(record.stage == Stage::Idle, "a page has two pending updates (page {})",
               page.page->name());
  enqueue(record, std::move(scalars));
  record.early = true;
  record.released = false;
  record.reversible = reversible;
  record.next = early_home(page, reversible);
  ++stats_.early;
  changed_.notify_all();
}

void Updater::enqueue(Record& record, std::shared_ptr<const StepScalars> scalars) {
  record.step = std::move(scalars);
  record.early = record.reversible = record.rolled_back = record.copies = false;
  record.released = true;
  record.next = nullptr;
  record.parts = Parts::Open;
  enqueue(record);
}

void Updater::enqueue(Record& record) {
  record.stage = Stage::Waiting;
  queue_.insert(std::upper_bound(queue_.begin(), queue_.end(), &record, sooner), &record);
  ++pending_;
}

bool Updater::early(const TrainedPage& page) const {
  const std::lock_guard lock(mutex_);
  const Record& record = *records_.at(page.page);
  return record.stage != Stage::Idle && !record.released;
}

void Updater::release(std::span<TrainedPage* const> pages) {
  std::vector<Record*> complete;
  {
    const std::lock_guard lock(mutex_);
    for (const TrainedPage* page : pages) {
      Record& record = *records_.at(page->page);
      PAGODA_CHECK(record.stage != Stage::Idle && !record.released,
                   "no early update of page {} has begun", page->page->name());
      ++record.target;
      record.released = true;
      if (record.stage == Stage::Waiting) {  // an ordinary one
        record.early = record.reversible = false;
      } else if (record.stage == Stage::Computed && exchanges(*record.page, *record.next)) {
        complete.push_back(&record);
      } else if (record.stage == Stage::Computed) {
        record.copies = true;
        enqueue(record);
      }
    }
    changed_.notify_all();
  }
  for (Record* record : complete) publish(*record);
}

void Updater::roll_back(std::span<TrainedPage* const> pages) {
  std::unique_lock lock(mutex_);
  for (const TrainedPage* page : pages) {
    Record& record = *records_.at(page->page);
    PAGODA_CHECK(!record.released && (record.reversible || record.stage == Stage::Waiting),
                 "an update cannot be rolled back (page {})", page->page->name());
    ++stats_.rolled_back;
    if (record.stage == Stage::Running) {
      record.rolled_back = true;
      continue;
    }
    if (record.stage == Stage::Waiting) {
      std::erase(queue_, &record);
      --pending_;
    }
    record.stage = Stage::Idle;
  }
  changed_.notify_all();
  for (const TrainedPage* page : pages) {
    const Record& record = *records_.at(page->page);
    changed_.wait(lock, [&] { return record.stage == Stage::Idle || error_ != nullptr; });
  }
  if (error_ != nullptr) std::rethrow_exception(error_);
  lock.unlock();
  for (const TrainedPage* page : pages) pager_.withdraw_next(*page->page);
}

void Updater::follow(std::span<TrainedPage* const> order) {
  const std::lock_guard lock(mutex_);
  for (auto& [page, record] : records_) record->place = ~std::size_t{0};
  std::size_t place = 0;
  for (const TrainedPage* page : order) records_.at(page->page)->place = place++;
  std::stable_sort(queue_.begin(), queue_.end(), sooner);
}

/// Whether `a` is updated before `b`, if both wait.
bool Updater::sooner(const Record* a, const Record* b) noexcept {
  if (a->urgent || b->urgent) return a->urgent && !b->urgent;
  return a->place < b->place;
}

/// Somebody waits for it: it goes before all others that wait.
void Updater::bring_forward(Record& record) {
  const auto queued = std::find(queue_.begin(), queue_.end(), &record);
  if (queued == queue_.end()) return;
  record.urgent = true;
  queue_.erase(queued);
  queue_.push_front(&record);
}

void Updater::wait_for_update(pager::Page& page) {
  std::unique_lock lock(mutex_);
  const auto found = records_.find(&page);
  PAGODA_CHECK(found != records_.end(), "page {} has a pending update and no state", page.name());
  Record& record = *found->second;
  bring_forward(record);
  const std::uint64_t target = record.target;
  changed_.wait(lock, [&] { return record.done >= target || error_ != nullptr; });
  if (error_ != nullptr) std::rethrow_exception(error_);
  lock.unlock();
  // This rank's part is done; where other ranks' are missing, the pager learns of them.
  pager_.wait_for_version(page);
}

bool Updater::can_wait_for_rows(const pager::Page& page, std::uint64_t wanted) {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(&page);
  if (found == records_.end()) return true;  // not trained: always up to date
  const Record& record = *found->second;
  return record.in_place && record.page->updated.size() == page.elements && record.target >= wanted;
}

const std::byte* Updater::wait_for_rows(pager::Page& page, std::span<const pager::Range> parts) {
  std::unique_lock lock(mutex_);
  Record& record = *records_.at(&page);
  const std::uint64_t target = record.target;
  // An early update that step() has found under way leaves them where home will be.
  const auto where = [&] {
    return record.done < target && record.early ? record.next->data()
                                                : pager::Pager::home(page).data();
  };
  if (record.done >= target || record.parts == Parts::All || parts.empty()) return where();
  // Others of it may have gone first already, and once is enough: then the rest comes next.
  const bool first = record.parts == Parts::Open;
  if (first) {
    record.parts = Parts::Asked;
    record.asked.assign(parts.begin(), parts.end());
    asked_.push_back(&record);
    changed_.notify_all();
  } else {
    bring_forward(record);
  }
  changed_.wait(lock, [&] {
    return (first && record.parts == Parts::Made) || record.parts == Parts::All ||
           record.done >= target || error_ != nullptr;
  });
  if (error_ != nullptr) std::rethrow_exception(error_);
  return where();
}

void Updater::about_to_write(pager::Page& page) {
  call_of_trained(before_write_, page);
}

void Updater::about_to_hold(pager::Page& page) {
  call_of_trained(before_hold_, page);
}

/// Calls it without the lock, for it may wait.
void Updater::call_of_trained(const Writing& callback, pager::Page& page) {
  Writing call;
  {
    const std::lock_guard lock(mutex_);
    if (!records_.contains(&page)) return;
    call = callback;
  }
  if (call) call(page);
}

void Updater::wait_for_shard(const pager::Page& page, std::uint64_t version) {
  std::unique_lock lock(mutex_);
  const auto found = records_.find(&page);
  if (found == records_.end()) return;  // not trained: always up to date
  // The record stays as long as somebody waits; the map may change meanwhile.
  Record& record = *found->second;
  ++record.waiting;
  changed_.wait(lock, [&] {
    return record.done >= version || record.removed || error_ != nullptr || stopping_;
  });
  const bool made = record.done >= version;
  --record.waiting;
  changed_.notify_all();
  if (error_ != nullptr) std::rethrow_exception(error_);
  PAGODA_CHECK(made, "page {} has no update {}: its model was released, or the engine ends",
               page.name(), version);
}

void Updater::wait_for_shard(const pager::Page& page) {
  std::unique_lock lock(mutex_);
  const Record& record = *records_.at(&page);
  changed_.wait(lock,
                [&] { return record.done == record.target || error_ != nullptr || stopping_; });
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void Updater::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return pending_ == 0 || error_ != nullptr; });
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void Updater::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (error_ == nullptr) error_ = std::move(error);
  changed_.notify_all();
}

UpdaterStats Updater::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Updater::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] {
      return stopping_ || (error_ == nullptr && (!queue_.empty() || !asked_.empty())) ||
             current_ != nullptr || !reading_.empty() || !writing_.empty();
    });
    if (stopping_ || error_ != nullptr) {
      // Buffers are the disk's until their transfers are over.
      lock.unlock();
      for (auto& slot : slots_) slot->chunk.abandon();  // the first error is already known
      lock.lock();
      if (stopping_) return;
      changed_.wait(lock, [&] { return stopping_; });
      return;
    }
    try {
      while (!asked_.empty()) {
        Record& record = *asked_.front();
        asked_.pop_front();
        make_parts(record, lock);
      }
      fill_slots(lock);
      lock.unlock();
      if (!reading_.empty()) {
        Slot& slot = *reading_.front();
        naming_page(*slot.record->page, [&] { compute(slot); });
        reading_.pop_front();
        writing_.push_back(&slot);
      }
      // Half of the slots may be on their way out: the disk always has reads and writes before it.
      while (!writing_.empty() &&
             (reading_.empty() || (free_.empty() && 2 * writing_.size() >= slots_.size()) ||
              writing_.front()->chunk.arrived())) {
        Slot& slot = *writing_.front();
        naming_page(*slot.record->page, [&] { finish(slot); });
        writing_.pop_front();
        free_.push_back(&slot);
      }
      lock.lock();
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      if (error_ == nullptr && options_.on_failure) {
        // Before those who wait are told: what they do next must find the engine failed.
        lock.unlock();
        options_.on_failure(std::current_exception());
        lock.lock();
      }
      if (error_ == nullptr) error_ = std::current_exception();
      changed_.notify_all();
    }
  }
}

/// Gives free slots the next chunks and starts their reads.
void Updater::fill_slots(RankedLock<LockRank::Updater>& lock) {
  while (!free_.empty()) {
    if (current_ == nullptr) {
      if (queue_.empty()) break;
      current_ = queue_.front();
      current_->urgent = false;
      queue_.pop_front();
      next_chunk_ = 0;
      current_->stage = Stage::Running;
      current_->chunks_left = current_->copies ? 0 : current_->chunks();
      if (current_->chunks_left == 0) {  // nothing of it is this rank's, or all is computed
        lock.unlock();
        page_done(*std::exchange(current_, nullptr));
        lock.lock();
      }
      continue;
    }
    Slot& slot = *free_.front();
    Record& record = *current_;
    const std::uint64_t chunk = next_chunk_++;
    if (next_chunk_ == record.chunks()) current_ = nullptr;
    lock.unlock();
    Bytes from_disk = 0;
    naming_page(*record.page, [&] {
      from_disk = slot.chunk.begin(*record.page, record.layout, chunk, record.written());
    });
    slot.record = &record;
    free_.pop_front();
    reading_.push_back(&slot);
    lock.lock();
    stats_.nvme_read += from_disk;
  }
}

void Updater::compute(Slot& slot) {
  Record& record = *slot.record;
  const Stopwatch waiting;
  slot.chunk.wait();
  const Nanos waited = waiting.elapsed_ns();

  const pager::Range elements = slot.chunk.elements();
  {
    const std::lock_guard lock(mutex_);
    if (record.rolled_back) return;
  }
  PAGODA_TRACE("optim", "update", {"page", record.page->page->name()},
               {"elements", elements.size()});
  const Stopwatch working;
  if (record.page->state_blank) slot.chunk.fill_blank(pool_);
  slot.chunk.apply(without(elements, record.made), *record.step, options_.seed, pool_);
  ++record.computed;
  const Nanos busy = working.elapsed_ns();

  const Bytes to_disk = slot.chunk.write();
  const std::lock_guard lock(mutex_);
  stats_.waited_io += waited;
  stats_.busy += busy;
  stats_.elements += elements.size();
  stats_.nvme_written += to_disk;
}

/// Updates the parts that somebody waits for, as far as their chunks' turn has not come yet.
void Updater::make_parts(Record& record, RankedLock<LockRank::Updater>& lock) {
  const TrainedPage& page = *record.page;
  std::vector<pager::Range> parts = std::exchange(record.asked, {});
  if (page.state_blank) {
    record.parts = Parts::Whole;
    bring_forward(record);
    return;
  }
  lock.unlock();
  PAGODA_TRACE("optim", "update parts", {"page", page.page->name()}, {"parts", parts.size()});
  const Stopwatch working;
  UpdateChunk chunk(pager_.tiers());  // nothing needs a buffer: see can_wait_for_rows()
  auto next = parts.cbegin();
  naming_page(page, [&] {
    for (std::uint64_t index = record.computed; index < record.chunks(); ++index) {
      const pager::Range elements = chunk_elements(page, record.layout, index);
      while (next != parts.cend() && next->end <= elements.begin) ++next;
      std::vector<pager::Range> here;
      for (auto part = next; part != parts.cend() && part->begin < elements.end; ++part) {
        here.push_back({std::max(part->begin, elements.begin), std::min(part->end, elements.end)});
      }
      if (here.empty()) continue;
      chunk.begin(page, record.layout, index, record.written());
      chunk.apply(here, *record.step, options_.seed, pool_);
    }
  });
  lock.lock();
  stats_.busy += working.elapsed_ns();
  record.made = std::move(parts);
  record.parts = Parts::Made;
  changed_.notify_all();
}

void Updater::finish(Slot& slot) {
  const Stopwatch waiting;
  slot.chunk.wait();
  Record& record = *std::exchange(slot.record, nullptr);
  {
    const std::lock_guard lock(mutex_);
    stats_.waited_io += waiting.elapsed_ns();
  }
  if (--record.chunks_left == 0) page_done(record);
}

/// All of an update is computed: nobody sees an early one before its step().
void Updater::page_done(Record& record) {
  {
    const std::lock_guard lock(mutex_);
    record.page->state_blank = false;
    record.computed = 0;
    record.parts = Parts::All;
    record.asked.clear();
    record.made.clear();
    std::erase(asked_, &record);
    changed_.notify_all();
    if (!record.released) {
      record.stage = record.rolled_back ? Stage::Idle : Stage::Computed;
      if (record.stage == Stage::Computed &&
          record.page->updated.size() == record.page->page->elements) {
        pager_.offer_next(*record.page->page, *record.next);
      }
      --pending_;
      changed_.notify_all();
      return;
    }
  }
  if (record.early && !exchanges(*record.page, *record.next)) {
    naming_page(*record.page,
                [&] { copy_parameters(pager_.tiers(), *record.page, *record.next, pool_); });
  }
  publish(record);
  const std::lock_guard lock(mutex_);
  --pending_;
  changed_.notify_all();
}

/// The update has been computed and asked for: it becomes the page's.
void Updater::publish(Record& record) {
  TrainedPage& page = *record.page;
  std::uint64_t version = 0;
  Finished finished;
  {
    const std::lock_guard lock(mutex_);
    if (record.early && exchanges(page, *record.next)) {
      pager_.exchange_home(*page.page, const_cast<pager::Home&>(*record.next));
    }
    if (record.reversible) std::swap(page.state, page.spare);
    for (TrainedParameter& parameter : page.parameters) {
      if (parameter.used) ++parameter.updates;
      parameter.used = false;
    }
    record.stage = Stage::Idle;
    version = ++record.done;
    finished = finished_;
    ++stats_.pages;
    changed_.notify_all();
  }
  if (!finished || finished(page, version)) pager_.updated(*page.page, version);
}

pager::Range Updater::kept(const pager::Page& page, pager::Range shard) {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(&page);
  return found == records_.end() ? shard : found->second->page->updated;
}

void Updater::overwritten(pager::Page& page, std::uint64_t begin, std::uint64_t count,
                          const std::byte* before, const std::byte* after) {
  Record* record = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(&page);
    if (found == records_.end()) return;
    record = found->second.get();
  }
  follow_parameters(pager_.tiers(), *record->page, record->layout, begin, count, before, after);
}

}  // namespace pagoda::optim

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/updater.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"
#include "pagoda/optim/early_home.h"
#include "pagoda/optim/update_record.h"
#include "pagoda/optim/update_slot.h"

namespace pagoda::optim {

using Rows = UpdateRecord::Rows;
using Stage = UpdateRecord::Stage;

namespace {

using kernels::Dtype;
using pager::Tier;

/// Elements whose state is whole blocks of a disk, however few bytes each has.
constexpr std::uint64_t kWholeBlocks = io::ExtentAllocator::kLargeAlignment;

}  // namespace

Updater::Updater(pager::Pager& pager, ThreadPool& pool, Options options)
    : pager_(pager), pool_(pool), options_(options) {
  PAGODA_REQUIRE_EQ(options_.chunk % pager::Sharding::kBlock, 0U,
                    "update_chunk must be a multiple of {} elements", pager::Sharding::kBlock);
  PAGODA_REQUIRE_GE(options_.buffers, 2U, "update_buffers must be at least 2");
  const Bytes bytes = UpdateChunk::buffer_bytes(options_.chunk);
  for (unsigned i = 0; i < options_.buffers; ++i) {
    pager::HostBlock buffer;
    if (!pager_.tiers().all_in_place()) {
      buffer = pager_.tiers().host().allocate(bytes, pager::tag::kStaging, "update buffer");
    }
    slots_.push_back(std::make_unique<UpdateSlot>(pager_.tiers(), std::move(buffer)));
    free_.push_back(slots_.back().get());
  }
  thread_ = start_thread<std::jthread>([this] {
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
  auto record = std::make_unique<UpdateRecord>();
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

std::optional<Updater::EarlyBytes> Updater::early_bytes(const TrainedPage& page,
                                                        bool reversible) const {
  const std::lock_guard lock(mutex_);
  const UpdateRecord& record = *records_.at(page.page);
  // Of a page with several parameters, what an update leaves out would have to be copied.
  if (!page.one_parameter() || (reversible && !record.in_place)) return std::nullopt;
  if (early_home(*record.page, reversible, pager_) != nullptr) return EarlyBytes{};
  return EarlyBytes{reversible ? page.state.size() : 0,
                    page.updated.size() * page.page->element_size};
}

void Updater::remove(TrainedPage& page) {
  std::unique_lock lock(mutex_);
  const auto found = records_.find(page.page);
  if (found == records_.end()) return;
  UpdateRecord& record = *found->second;
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
    UpdateRecord& record = *records_.at(page->page);
    ++record.target;
    record.enter(Stage::Queued);
    enqueue(record, scalars);
  }
  changed_.notify_all();
}

bool Updater::may_start_early(const TrainedPage& page, bool reversible) const {
  const std::lock_guard lock(mutex_);
  // The first update makes the master from the parameter, and reads what others only write.
  const UpdateRecord& record = *records_.at(page.page);
  return record.stage() == Stage::Idle && !page.state_blank && page.one_parameter() &&
         early_home(*record.page, reversible, pager_) != nullptr;
}

void Updater::start_early(TrainedPage& page, std::shared_ptr<const StepScalars> scalars,
                          bool reversible) {
  const std::lock_guard lock(mutex_);
  UpdateRecord& record = *records_.at(page.page);
  record.enter(Stage::EarlyQueued);
  enqueue(record, std::move(scalars));
  record.reversible = reversible;
  record.next = early_home(page, reversible, pager_);
  ++stats_.early;
  changed_.notify_all();
}

void Updater::enqueue(UpdateRecord& record, std::shared_ptr<const StepScalars> scalars) {
  record.step = std::move(scalars);
  record.rows = Rows::Open;
  enqueue(record);
}

void Updater::enqueue(UpdateRecord& record) {
  queue_.add(record);
  ++pending_;
}

bool Updater::early(const TrainedPage& page) const {
  const std::lock_guard lock(mutex_);
  return records_.at(page.page)->early();
}

void Updater::release(std::span<TrainedPage* const> pages) {
  std::vector<UpdateRecord*> complete;
  {
    const std::lock_guard lock(mutex_);
    for (const TrainedPage* page : pages) {
      UpdateRecord& record = *records_.at(page->page);
      PAGODA_CHECK(record.early(), "no early update of page {} has begun", page->page->name());
      ++record.target;
      if (record.stage() == Stage::EarlyQueued) {
        record.enter(Stage::Queued);
      } else if (record.stage() == Stage::EarlyRunning) {
        record.enter(Stage::Running);
      } else if (exchanges_home(*record.page, *record.next, pager_)) {
        complete.push_back(&record);
      } else {
        record.enter(Stage::Copying);
        enqueue(record);
      }
    }
    changed_.notify_all();
  }
  for (UpdateRecord* record : complete) publish(*record);
}

/// Somebody waits on the record: it stays meanwhile, whatever happens to the map. Made and dropped
/// under mutex_.
class Updater::Waiter {
 public:
  Waiter(UpdateRecord& record, Condition& changed) : record_(record), changed_(changed) {
    ++record_.waiting;
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  ~Waiter() {
    if (--record_.waiting == 0) changed_.notify_all();
  }
  const UpdateRecord* operator->() const noexcept { return &record_; }

 private:
  UpdateRecord& record_;
  Condition& changed_;
};

void Updater::roll_back(std::span<TrainedPage* const> pages) {
  std::unique_lock lock(mutex_);
  std::deque<Waiter> waiters;
  for (const TrainedPage* page : pages) {
    UpdateRecord& record = *records_.at(page->page);
    PAGODA_CHECK(record.early(), "step() has asked for an update that is rolled back (page {})",
                 page->page->name());
    ++stats_.rolled_back;
    if (record.stage() == Stage::EarlyQueued) {
      queue_.remove(record);
      --pending_;
      record.enter(Stage::Idle);
      continue;
    }
    PAGODA_CHECK(record.reversible, "an update cannot be rolled back (page {})",
                 page->page->name());
    record.enter(record.stage() == Stage::EarlyRunning ? Stage::RollingBack : Stage::Idle);
    waiters.emplace_back(record, changed_);
  }
  changed_.notify_all();
  for (const Waiter& waiter : waiters) {
    changed_.wait(lock, [&] { return waiter->stage() == Stage::Idle || error_ != nullptr; });
  }
  waiters.clear();
  if (error_ != nullptr) std::rethrow_exception(error_);
  lock.unlock();
  for (const TrainedPage* page : pages) pager_.withdraw_next(*page->page);
}

void Updater::follow(std::span<TrainedPage* const> order) {
  const std::lock_guard lock(mutex_);
  for (auto& [page, record] : records_) record->place = ~std::size_t{0};
  std::size_t place = 0;
  for (const TrainedPage* page : order) records_.at(page->page)->place = place++;
  queue_.sort();
}

void Updater::wait_for_update(pager::Page& page) {
  {
    std::unique_lock lock(mutex_);
    const auto found = records_.find(&page);
    if (found == records_.end()) {  // applied, and its model released, since the caller looked
      lock.unlock();
      const pager::PageSnapshot now = pager_.look(page);
      PAGODA_CHECK(now.version >= now.wanted, "page {} has a pending update and no state",
                   page.name());
      return;
    }
    UpdateRecord& record = *found->second;
    const Waiter waiter(record, changed_);
    queue_.bring_forward(record);
    const std::uint64_t target = record.target;
    changed_.wait(lock, [&] { return record.done >= target || error_ != nullptr; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  // This rank's shard is done; where other ranks' are missing, the pager learns of them.
  pager_.wait_for_version(page);
}

void Updater::wait_for_early(const TrainedPage& page) {
  std::unique_lock lock(mutex_);
  UpdateRecord& record = *records_.at(page.page);
  const Waiter waiter(record, changed_);
  if (record.early()) queue_.bring_forward(record);
  changed_.wait(lock, [&] {
    const bool computing = record.stage() == Stage::EarlyQueued || record.early_under_way();
    return !computing || error_ != nullptr || stopping_;
  });
  if (error_ != nullptr) std::rethrow_exception(error_);
}

bool Updater::can_wait_for_rows(const pager::Page& page, std::uint64_t wanted) {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(&page);
  if (found == records_.end()) return true;  // not trained: always up to date
  const UpdateRecord& record = *found->second;
  return record.in_place && record.page->updated.size() == page.elements && record.target >= wanted;
}

const std::byte* Updater::wait_for_rows(pager::Page& page, std::span<const pager::Range> rows) {
  std::unique_lock lock(mutex_);
  const auto found = records_.find(&page);
  if (found == records_.end()) return pager::Pager::home(page).data();  // applied, and released
  UpdateRecord& record = *found->second;
  const Waiter waiter(record, changed_);
  const std::uint64_t target = record.target;
  // An early update that step() has found under way leaves them where home will be.
  const auto where = [&] {
    return record.done < target && record.next != nullptr ? record.next->data()
                                                          : pager::Pager::home(page).data();
  };
  if (record.done >= target || record.rows == Rows::All || rows.empty()) return where();
  // Others of it may have gone first already, and once is enough: then the rest comes next.
  const bool first = record.rows == Rows::Open;
  if (first) {
    record.rows = Rows::Asked;
    record.asked.assign(rows.begin(), rows.end());
    asked_.push_back(&record);
    changed_.notify_all();
  } else {
    queue_.bring_forward(record);
  }
  changed_.wait(lock, [&] {
    return (first && record.rows == Rows::Made) || record.rows == Rows::All ||
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
  UpdateRecord& record = *found->second;
  const Waiter waiter(record, changed_);
  changed_.wait(lock, [&] {
    return record.done >= version || record.removed || error_ != nullptr || stopping_;
  });
  if (error_ != nullptr) std::rethrow_exception(error_);
  PAGODA_CHECK(record.done >= version,
               "page {} has no update {}: its model was released, or the engine ends", page.name(),
               version);
}

void Updater::wait_for_shard(const pager::Page& page) {
  std::unique_lock lock(mutex_);
  UpdateRecord& record = *records_.at(&page);
  const Waiter waiter(record, changed_);
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

pager::Range Updater::kept(const pager::Page& page, pager::Range shard) {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(&page);
  return found == records_.end() ? shard : found->second->page->updated;
}

void Updater::overwritten(pager::Page& page, std::uint64_t begin, std::uint64_t count,
                          const std::byte* before, const std::byte* after) {
  UpdateRecord* record = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(&page);
    if (found == records_.end()) return;
    record = found->second.get();
  }
  follow_parameters(pager_.tiers(), *record->page, record->layout, begin, count, before, after);
}

}  // namespace pagoda::optim

// SPDX-License-Identifier: Apache-2.0
// What the updater's thread does.
#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/base/first_error.h"
#include "pagoda/base/trace.h"
#include "pagoda/optim/early_home.h"
#include "pagoda/optim/update_record.h"
#include "pagoda/optim/update_slot.h"
#include "pagoda/optim/updater.h"

namespace pagoda::optim {

using Rows = UpdateRecord::Rows;
using Stage = UpdateRecord::Stage;

namespace {

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
        UpdateRecord& record = *asked_.front();
        asked_.pop_front();
        make_rows(record, lock);
      }
      fill_slots(lock);
      lock.unlock();
      if (!reading_.empty()) {
        UpdateSlot& slot = *reading_.front();
        naming_page(*slot.record->page, [&] { compute(slot); });
        reading_.pop_front();
        writing_.push_back(&slot);
      }
      // Half of the slots may be on their way out: the disk always has reads and writes before it.
      while (!writing_.empty() &&
             (reading_.empty() || (free_.empty() && 2 * writing_.size() >= slots_.size()) ||
              writing_.front()->chunk.arrived())) {
        UpdateSlot& slot = *writing_.front();
        naming_page(*slot.record->page, [&] { finish(slot); });
        writing_.pop_front();
        free_.push_back(&slot);
      }
      lock.lock();
    } catch (...) {
      keep_first_error(error_, options_.on_failure, lock);
      changed_.notify_all();
    }
  }
}

/// Gives free slots the next chunks and starts their reads.
void Updater::fill_slots(RankedLock<LockRank::Updater>& lock) {
  while (!free_.empty()) {
    if (current_ == nullptr) {
      if (queue_.empty()) break;
      current_ = &queue_.take();
      next_chunk_ = 0;
      const bool copies = current_->stage() == Stage::Copying;
      if (!copies) current_->enter(current_->early() ? Stage::EarlyRunning : Stage::Running);
      current_->chunks_left = copies ? 0 : current_->chunks();
      if (current_->chunks_left == 0) {  // nothing of it is this rank's, or all is computed
        lock.unlock();
        page_done(*std::exchange(current_, nullptr));
        lock.lock();
      }
      continue;
    }
    UpdateSlot& slot = *free_.front();
    UpdateRecord& record = *current_;
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

void Updater::compute(UpdateSlot& slot) {
  UpdateRecord& record = *slot.record;
  const Stopwatch waiting;
  slot.chunk.wait();
  const Nanos waited = waiting.elapsed_ns();

  const pager::Range elements = slot.chunk.elements();
  {
    const std::lock_guard lock(mutex_);
    if (record.stage() == Stage::RollingBack) return;
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

/// Updates the rows that somebody waits for, as far as their chunks' turn has not come yet.
void Updater::make_rows(UpdateRecord& record, RankedLock<LockRank::Updater>& lock) {
  const TrainedPage& page = *record.page;
  std::vector<pager::Range> rows = std::exchange(record.asked, {});
  if (page.state_blank) {
    record.rows = Rows::Whole;
    queue_.bring_forward(record);
    return;
  }
  lock.unlock();
  PAGODA_TRACE("optim", "update rows", {"page", page.page->name()}, {"ranges", rows.size()});
  const Stopwatch working;
  UpdateChunk chunk(pager_.tiers());  // nothing needs a buffer: see can_wait_for_rows()
  auto next = rows.cbegin();
  naming_page(page, [&] {
    for (std::uint64_t index = record.computed; index < record.chunks(); ++index) {
      const pager::Range elements = chunk_elements(page, record.layout, index);
      while (next != rows.cend() && next->end <= elements.begin) ++next;
      std::vector<pager::Range> here;
      for (auto row = next; row != rows.cend() && row->begin < elements.end; ++row) {
        here.push_back({std::max(row->begin, elements.begin), std::min(row->end, elements.end)});
      }
      if (here.empty()) continue;
      chunk.begin(page, record.layout, index, record.written());
      chunk.apply(here, *record.step, options_.seed, pool_);
    }
  });
  lock.lock();
  stats_.busy += working.elapsed_ns();
  record.made = std::move(rows);
  record.rows = Rows::Made;
  changed_.notify_all();
}

void Updater::finish(UpdateSlot& slot) {
  const Stopwatch waiting;
  slot.chunk.wait();
  UpdateRecord& record = *std::exchange(slot.record, nullptr);
  {
    const std::lock_guard lock(mutex_);
    stats_.waited_io += waiting.elapsed_ns();
  }
  if (--record.chunks_left == 0) page_done(record);
}

/// All of an update is computed: nobody sees an early one before its step().
void Updater::page_done(UpdateRecord& record) {
  {
    const std::lock_guard lock(mutex_);
    record.page->state_blank = false;
    record.computed = 0;
    record.rows = Rows::All;
    record.asked.clear();
    record.made.clear();
    std::erase(asked_, &record);
    changed_.notify_all();
    if (record.early_under_way()) {
      const bool computed = record.stage() == Stage::EarlyRunning;
      record.enter(computed ? Stage::Computed : Stage::Idle);
      if (computed && record.page->updated.size() == record.page->page->elements) {
        pager_.offer_next(*record.page->page, *record.next);
      }
      --pending_;
      changed_.notify_all();
      return;
    }
  }
  if (record.next != nullptr && !exchanges_home(*record.page, *record.next, pager_)) {
    naming_page(*record.page,
                [&] { copy_parameters(pager_.tiers(), *record.page, *record.next, pool_); });
  }
  publish(record);
  const std::lock_guard lock(mutex_);
  --pending_;
  changed_.notify_all();
}

/// The update has been computed and asked for: it becomes the page's.
void Updater::publish(UpdateRecord& record) {
  TrainedPage& page = *record.page;
  std::uint64_t version = 0;
  Finished finished;
  {
    const std::lock_guard lock(mutex_);
    if (record.next != nullptr && exchanges_home(page, *record.next, pager_)) {
      pager_.exchange_home(*page.page, *record.next);
    }
    if (record.reversible) std::swap(page.state, page.spare);
    for (TrainedParameter& parameter : page.parameters) {
      if (parameter.used) ++parameter.updates;
      parameter.used = false;
    }
    record.enter(Stage::Idle);
    version = ++record.done;
    finished = finished_;
    ++stats_.pages;
    changed_.notify_all();
  }
  if (!finished || finished(page, version)) pager_.updated(*page.page, version);
}

}  // namespace pagoda::optim

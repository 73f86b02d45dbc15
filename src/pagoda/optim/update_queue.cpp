// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/update_queue.h"

#include <algorithm>

#include "pagoda/optim/update_record.h"

namespace pagoda::optim {
namespace {

/// Whether `a` is updated before `b`.
bool sooner(const UpdateRecord* a, const UpdateRecord* b) noexcept {
  if (a->urgent || b->urgent) return a->urgent && !b->urgent;
  return a->place < b->place;
}

}  // namespace

void UpdateQueue::add(UpdateRecord& record) {
  records_.insert(std::upper_bound(records_.begin(), records_.end(), &record, sooner), &record);
}

void UpdateQueue::remove(UpdateRecord& record) {
  std::erase(records_, &record);
}

void UpdateQueue::bring_forward(UpdateRecord& record) {
  const auto queued = std::find(records_.begin(), records_.end(), &record);
  if (queued == records_.end()) return;
  record.urgent = true;
  records_.erase(queued);
  records_.push_front(&record);
}

void UpdateQueue::sort() {
  std::stable_sort(records_.begin(), records_.end(), sooner);
}

UpdateRecord& UpdateQueue::take() {
  UpdateRecord& first = *records_.front();
  records_.pop_front();
  first.urgent = false;
  return first;
}

}  // namespace pagoda::optim

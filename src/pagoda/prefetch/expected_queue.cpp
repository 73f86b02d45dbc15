// SPDX-License-Identifier: Apache-2.0
#include "pagoda/prefetch/expected_queue.h"

#include <algorithm>
#include <bit>

#include "pagoda/base/error.h"

namespace pagoda::prefetch {

ExpectedQueue::ExpectedQueue(std::size_t horizon) : horizon_(horizon) {
  PAGODA_REQUIRE_GE(horizon, 1U);
  slots_.resize(std::bit_ceil(horizon));
}

Expected ExpectedQueue::at(std::size_t i) const noexcept {
  const Slot& found = slot(begin_ + i);
  return {found.touch, found.strength, found.due - now_};
}

std::optional<std::size_t> ExpectedQueue::next_use(PageId page) const noexcept {
  if (page >= uses_.size() || uses_[page].epoch != epoch_) return std::nullopt;
  return static_cast<std::size_t>(uses_[page].first - begin_) + 1;
}

void ExpectedQueue::push(Touch touch, std::uint8_t strength, Nanos gap) {
  PAGODA_CHECK(!full());
  if (touch.page >= uses_.size()) {
    uses_.resize(std::max<std::size_t>(touch.page + std::size_t{1}, 2 * uses_.size()));
  }
  const Nanos before = size() == 0 ? now_ : slot(end_ - 1).due;
  Slot& added = slot(end_);
  added = {touch, strength, before + gap, kNone, kNone};
  Uses& uses = uses_[touch.page];
  if (uses.epoch == epoch_) {
    slot(uses.last).next = end_;
    added.previous = uses.last;
  } else {
    uses.first = end_;
    uses.epoch = epoch_;
  }
  uses.last = end_++;
}

void ExpectedQueue::pop() noexcept {
  const Slot& front = slot(begin_++);
  now_ = front.due;
  Uses& uses = uses_[front.touch.page];
  if (front.next == kNone) {
    uses.epoch = 0;
  } else {
    uses.first = front.next;
    slot(front.next).previous = kNone;
  }
}

void ExpectedQueue::clear() noexcept {
  begin_ = end_;
  ++epoch_;
}

void ExpectedQueue::truncate(std::size_t count) noexcept {
  while (size() > count) {
    const Slot& back = slot(--end_);
    Uses& uses = uses_[back.touch.page];
    if (back.previous == kNone) {
      uses.epoch = 0;
    } else {
      uses.last = back.previous;
      slot(back.previous).next = kNone;
    }
  }
}

}  // namespace pagoda::prefetch

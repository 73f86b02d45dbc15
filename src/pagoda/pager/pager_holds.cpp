// SPDX-License-Identifier: Apache-2.0
// Pager: pages that user code holds, to use them by raw pointers.
#include "pagoda/base/error.h"
#include "pagoda/io/checksum.h"
#include "pagoda/pager/pager.h"

namespace pagoda::pager {

void Pager::hold(Page& page, device::Stream* consumer, bool write) {
  const Access access{&page, write};
  touch({&access, 1}, 0, consumer);
  try {
    if (consumer != nullptr) await_copies({&access, 1});  // a pointer may go to any stream
    if (!write) {
      Lock lock(mutex_);
      keep_held(page, lock);
    }
  } catch (...) {
    unpin({&access, 1}, consumer);
    throw;
  }
  const Lock lock(mutex_);
  ++page.holds;
  page.held_for_write = page.held_for_write || write;
  forget_pin(page);  // touch() has just put it there
}

void Pager::release_hold(Page& page) noexcept {
  const Lock lock(mutex_);
  note_raw_write(page, lock);
  --page.holds;
  --page.pins;
  ++changes_;
  if (page.holds == 0) {
    page.held_for_write = false;
    if (!page.dirty) page.before = {};
  }
  recount(page, lock);
  if (starved_ > 0) changed_.notify_all();
}

/// What raw pointers may write to is as it was now: for note_raw_write(), and for masters to
/// follow.
void Pager::keep_held(Page& page, Lock& lock) {
  if (copies_at_once()) {
    page.held_sum = io::checksum({page.device_block().data(), page.bytes()});
  } else if (!page.held_for_write) {
    return;
  }
  if (!page.dirty) page.before = {};
  keep_before(page, lock);
}

/// Pointers are not seen when they write. Their bytes are, where the host can read them.
void Pager::note_raw_write(Page& page, const Lock& /*lock*/) {
  bool written = page.held_for_write;
  if (copies_at_once()) {
    const std::uint64_t sum = io::checksum({page.device_block().data(), page.bytes()});
    written = written || sum != page.held_sum;
    page.held_sum = sum;
  }
  if (!written) return;
  page.dirty = true;
  page.blank = false;
}

void Pager::find_raw_writes() {
  const Lock lock(mutex_);
  for (Page* page : by_id_) {
    if (page != nullptr && page->holds > 0) note_raw_write(*page, lock);
  }
}

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
// Pager: homes read and written as a whole, piece by piece, while a model is attached.
#include <algorithm>
#include <cstring>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/pager/pager.h"

namespace pagoda::pager {

void Pager::read_home(Page& page, Range elements, Bytes piece, const ReadPiece& read) {
  publish(page);
  const std::lock_guard writing(write_mutex_);
  PAGODA_CHECK(elements.begin >= page.home_range.begin && elements.end <= page.home_range.end,
               "page '{}' is not all here", page.name);
  const Bytes first = page.home_range.begin * page.element_size;
  const Bytes end = elements.end * page.element_size;
  piece = std::min(piece, options_.staging);
  for (Bytes at = elements.begin * page.element_size; at < end;) {
    const std::span bytes(write_staging_.data(), std::min(piece, end - at));
    if (page.blank) {
      std::memset(bytes.data(), 0, bytes.size());
    } else {
      tiers_.read(page.home, at - first, bytes);
    }
    read(bytes);
    at += bytes.size();
  }
}

void Pager::write_home(Page& page, Bytes piece, const WritePiece& write) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !page.moving() && page.readers == 0; });
  if (page.residency == Residency::Resident && !page.fixed) {
    PAGODA_CHECK_EQ(page.pins, 0U, "a page in use is overwritten (page {})", page.name);
    drop_copy(page, lock);
  }
  const Residency was = page.residency;
  if (!page.fixed) set_residency(page, Residency::Leaving, lock);  // nobody fetches it meanwhile
  std::exception_ptr error;
  try {
    await_reads(page, lock);
    lock.unlock();
    const std::lock_guard writing(write_mutex_);
    if (page.written.event != nullptr) page.written.event->wait();
    piece = std::min(piece, options_.staging);
    for (Bytes at = 0; at < page.home.size();) {
      const std::span bytes(write_staging_.data(), std::min(piece, page.home.size() - at));
      write(bytes);
      tiers_.write(page.home, at, bytes);
      at += bytes.size();
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  page.blank = false;
  page.dirty = false;
  page.own_copy = {};
  page.before = {};
  if (!page.fixed) set_residency(page, was, lock);
  changed_.notify_all();
  if (error != nullptr) std::rethrow_exception(error);
}

void Pager::fill_blank(Page& page) {
  {
    const Lock lock(mutex_);
    if (!page.blank || page.dirty || page.fixed) return;
  }
  write_home(page, options_.staging,
             [](std::span<std::byte> bytes) { std::memset(bytes.data(), 0, bytes.size()); });
}

}  // namespace pagoda::pager

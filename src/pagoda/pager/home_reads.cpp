// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/home_reads.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "pagoda/base/log.h"

namespace pagoda::pager::home_reads {
namespace {

/// Whether a stream is behind the mark. A stream that has failed counts as if it were: it does
/// nothing more.
bool passed(const device::Mark& mark) noexcept {
  try {
    return mark.event == nullptr || mark.event->done();
  } catch (...) {
    return true;
  }
}

/// Of what has gone, only the order matters.
void wait_quietly(const device::Mark& mark) noexcept {
  try {
    mark.event->wait();
  } catch (...) {
  }
}

}  // namespace

void note(PageRecord& page, device::Mark mark, const PageTable::Lock& /*lock*/) noexcept {
  std::erase_if(page.reading, passed);
  try {
    page.reading.push_back(mark);
  } catch (...) {  // no memory to remember it with: wait instead
    wait_quietly(mark);
  }
}

bool any(const PageRecord& page, const PageTable::Lock& /*lock*/) noexcept {
  return !passed(page.ready) || !std::all_of(page.reading.begin(), page.reading.end(), passed);
}

void wait(PageRecord& page, PageTable::Lock& lock) {
  if (!any(page, lock)) {
    page.reading.clear();
    return;
  }
  const std::vector<device::Mark> marks = std::exchange(page.reading, {});
  const std::shared_ptr<device::Event> copied = page.ready.event;
  lock.unlock();
  std::exception_ptr error;
  for (const device::Mark& mark : marks) wait_quietly(mark);
  try {
    if (copied != nullptr) copied->wait();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error != nullptr) std::rethrow_exception(error);
}

void wait_for_earlier(PageRecord& page, PageTable::Lock& lock) noexcept {
  const std::vector<device::Mark> marks = std::exchange(page.reading, {});
  if (std::all_of(marks.begin(), marks.end(), passed)) return;
  lock.unlock();
  for (const device::Mark& mark : marks) wait_quietly(mark);
  lock.lock();
}

void wait_ignoring_errors(PageRecord& page, PageTable::Lock& lock) noexcept {
  try {
    wait(page, lock);
  } catch (const std::exception& error) {
    log::debug("pager", "a copy failed", {{"page", page.name()}, {"cause", error.what()}});
  }
}

}  // namespace pagoda::pager::home_reads

// SPDX-License-Identifier: Apache-2.0
// Pager: what it has to do with updates and with readers of homes.
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/comm/comm_error.h"
#include "pagoda/pager/pager.h"

namespace pagoda::pager {
namespace {

/// Another rank did not have the version asked for any more: a prefetch that came too late for its
/// step, which nobody needs.
bool refused_by_rank(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const comm::RemoteError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

void Pager::owe(std::span<Page* const> pages) {
  Lock lock(mutex_);
  for (Page* page : pages) {
    if (!page->owes()) ++owing_;
    ++page->wanted;
  }
  for (Page* page : pages) {
    changed_.wait(lock, [&] { return !page->moving() && page->readers == 0; });
    if (page->fetch_error != nullptr) {
      const std::exception_ptr error = std::exchange(page->fetch_error, nullptr);
      if (!refused_by_rank(error)) std::rethrow_exception(error);
    }
    await_reads(*page, lock);
    if (page->fixed || page->residency != Residency::Resident) continue;
    PAGODA_CHECK_EQ(page->pins, page->holds,
                    "an operator still runs on a page that is updated (page {})", page->name);
    if (page->holds == 0) drop_copy(*page, lock);
  }
}

void Pager::updated(Page& page, std::uint64_t version) {
  const Lock lock(mutex_);
  if (page.owes()) --owing_;
  page.version = version;
  if (page.owes()) ++owing_;
  page.blank = false;
  ++changes_;
  if (page.fixed) page.resident_version = version;
  if (foresight_ != nullptr && page.residency == Residency::Absent) foresight_->absent(page.id);
  changed_.notify_all();
  pump(lock);
}

void Pager::gradient_gone(Page& page) {
  const Lock lock(mutex_);
  page.gradient_gone = true;
}

bool Pager::ask_early(Page& page) {
  const Lock lock(mutex_);
  const bool written = page.dirty || page.own_copy || page.before;
  if (written || page.used_late || page.pins > 0 || page.moving() || page.owes()) return false;
  page.early = Early::Asked;
  return true;
}

void Pager::answer_early(Page& page, bool yes) {
  const Lock lock(mutex_);
  page.early = yes ? Early::Begun : Early::No;
  changed_.notify_all();
}

void Pager::step_begins(Page& page) {
  const Lock lock(mutex_);
  page.early = Early::No;
  page.gradient_gone = false;
}

void Pager::used_early(const Page& page) const {
  throw UserError(fmt::format(
      "page '{}' is used between its last gradient of a step and step(), which it was not in the "
      "steps before: its update has begun. Use it before backward() or after step(), or set "
      "early_updates to false",
      page.name));
}

void Pager::await_version(const Page& page) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !page.owes() || !refused_.empty(); });
  if (page.owes()) throw EngineError(refused_);
}

std::uint64_t Pager::add_reader(Page& page) {
  const Lock lock(mutex_);
  ++page.readers;
  return page.wanted;
}

void Pager::remove_reader(Page& page) noexcept {
  const Lock lock(mutex_);
  if (--page.readers == 0) changed_.notify_all();
}

}  // namespace pagoda::pager

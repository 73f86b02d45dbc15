// SPDX-License-Identifier: Apache-2.0
#include "pagoda/pager/bindings.h"

#include <algorithm>
#include <new>
#include <utility>

#include "pagoda/pager/thread_pins.h"

namespace pagoda::pager {

void Bindings::bind(PageRecord& page, const Lock& lock) noexcept {
  if (denied_now(page)) return;
  if (page.exposure == Exposure::Shut) {
    page.binding->open();
    page.exposure = Exposure::Pointer;
  } else {
    bind_to(page, page.device_block().data(), lock);
  }
}

void Bindings::unpinned(PageRecord& page, const Lock& lock) noexcept {
  if (page.exposure != Exposure::Pointer || page.binding == nullptr) return;
  if (denied_now(page)) return unbind(page, lock);  // an operator inside the one that is denied
  if (page.pins > 0 || page.fixed) return;
  if (!page.usual_message || !denials_.empty())
    return unbind(page, lock);  // it says something else
  page.binding->shut();
  page.exposure = Exposure::Shut;
}

void Bindings::bind_to(PageRecord& page, std::byte* data, const Lock& /*lock*/) noexcept {
  if (page.exposure != Exposure::None || page.binding == nullptr) return;
  page.binding->bind(data);
  page.exposure = Exposure::Pointer;
}

/// Where the engine has failed an access says why: an operator whose touch threw may be on its way
/// to it, while a fetch of the same page fails as well.
void Bindings::unbind(PageRecord& page, const Lock& /*lock*/) {
  const bool was_bound = std::exchange(page.exposure, Exposure::None) != Exposure::None;
  if (page.binding == nullptr) return;
  if (page.usual_message && denials_.empty() && refused_.empty()) {
    // The text stays as it is: user code may be reading it, on a thread that knows no lock.
    if (was_bound) page.binding->forget();
    return;
  }
  const auto denied = std::find_if(denials_.begin(), denials_.end(),
                                   [&](const Denial& denial) { return denial.page == &page; });
  if (denied != denials_.end()) {
    page.usual_message = false;
    page.binding->unbind(denied->why);
    return;
  }
  page.usual_message = refused_.empty();
  page.binding->unbind(page.usual_message ? message(page) : refused_);
}

/// The same wherever the page is: what is said must not depend on when it is asked.
std::string Bindings::message(const PageRecord& page) const {
  const char* text =
      page.fixed
          ? "page '{}' may have a pending update, which a raw pointer (numpy(), DLPack, "
            "data_ptr()) does not wait for: call engine.finish(), read a copy (clone()), {}"
          : "page '{}' may be evicted, so its raw pointer (numpy(), DLPack, data_ptr()) is not "
            "available: read a copy (clone()), {}";
  return fmt::format(fmt::runtime(text), page.name(), advice_);
}

void Bindings::changed(PageRecord& page, const Lock& lock) {
  page.usual_message = false;
  if (page.exposure != Exposure::Pointer) unbind(page, lock);
}

/// This thread's latest one of the page; null: there is none.
Bindings::Denial* Bindings::mine(const Page& page) noexcept {
  const auto found = std::find_if(denials_.rbegin(), denials_.rend(), [&](const Denial& denial) {
    return denial.page == &page && denial.mine();
  });
  return found == denials_.rend() ? nullptr : &*found;
}

/// Whether the storage throws to whoever asks it now.
bool Bindings::denied_now(const PageRecord& page) const noexcept {
  return std::any_of(denials_.begin(), denials_.end(), [&](const Denial& denial) {
    return denial.page == &page && denial.in_force &&
           (!denial.mine() || thread_pins::count(page) <= denial.outer);
  });
}

void Bindings::announce_denial(std::span<const Access> accesses, const std::string& why,
                               const Lock& /*lock*/) noexcept {
  for (const Access& access : accesses) {
    try {
      denials_.push_back(
          {access.page, std::this_thread::get_id(), why, thread_pins::count(*access.page)});
    } catch (const std::bad_alloc&) {  // other threads do not hear of it
    }
  }
}

/// What the user holds, and what operators around this one have, is bound again by allow().
void Bindings::deny(std::span<const Access> accesses, const std::string& why,
                    const Lock& /*lock*/) noexcept {
  for (const Access& access : accesses) {
    PageRecord& page = record_of(*access.page);
    if (page.binding == nullptr) continue;
    if (Denial* denial = mine(page)) denial->in_force = true;
    page.binding->unbind(why);
    page.exposure = Exposure::None;
    page.usual_message = false;
  }
}

void Bindings::allow(std::span<const Access> accesses, const Lock& lock) noexcept {
  for (const Access& access : accesses) {
    PageRecord& page = record_of(*access.page);
    if (const Denial* denial = mine(page))
      denials_.erase(denials_.begin() + (denial - &denials_[0]));
    if (page.exposure == Exposure::Pointer || page.binding == nullptr) continue;
    if (page.pins > 0 && page.residency == Residency::Resident && !denied_now(page)) {
      bind(page, lock);
    } else {
      unbind(page, lock);
    }
  }
}

bool Bindings::denied_to_others(std::span<const Access> accesses, const Lock& /*lock*/) const {
  if (denials_.empty()) return false;
  const bool awaited =
      !thread_pins::all().empty() ||
      std::any_of(denials_.begin(), denials_.end(), [](const Denial& d) { return d.mine(); });
  return std::any_of(denials_.begin(), denials_.end(), [&](const Denial& denial) {
    if (denial.mine() || (awaited && !denial.in_force)) return false;
    // What operators around this one have is denied to others while it was lent.
    return thread_pins::count(*denial.page) > 0 ||
           std::any_of(accesses.begin(), accesses.end(),
                       [&](const Access& access) { return access.page == denial.page; });
  });
}

bool Bindings::denies(const PageRecord& page, const Lock& /*lock*/) const noexcept {
  return std::any_of(denials_.begin(), denials_.end(),
                     [&](const Denial& denial) { return denial.page == &page && !denial.mine(); });
}

bool Bindings::is_denied(const PageRecord& page, const Lock& /*lock*/) const noexcept {
  return std::any_of(denials_.begin(), denials_.end(),
                     [&](const Denial& denial) { return denial.page == &page; });
}

void Bindings::refuse(std::string why, const Lock& /*lock*/) noexcept {
  if (refused_.empty()) refused_ = std::move(why);
}

void Bindings::require_not_refused(const Lock& /*lock*/) const {
  if (!refused_.empty()) throw EngineError(refused_);
}

}  // namespace pagoda::pager

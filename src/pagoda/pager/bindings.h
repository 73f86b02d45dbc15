// SPDX-License-Identifier: Apache-2.0
// Included by the pager's own files alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pagoda/pager/access.h"
#include "pagoda/pager/page_table.h"

namespace pagoda::pager {

/// Tells the storages of pages where their bytes are, or why there are none. Under the table's
/// lock.
class Bindings {
 public:
  using Lock = PageTable::Lock;

  /// `advice`: what the user writes to keep a page where raw pointers can see it.
  explicit Bindings(std::string advice) : advice_(std::move(advice)) {}

  /// The page is where its copy on the device is.
  void bind(PageRecord& page, const Lock& lock) noexcept;
  /// An operator has let go of the page. What can move throws to raw pointers unless it is pinned,
  /// so that they never find it by chance.
  void unpinned(PageRecord& page, const Lock& lock) noexcept;
  /// …or where `data` is, if it is nowhere yet.
  static void bind_to(PageRecord& page, std::byte* data, const Lock& lock) noexcept;
  void unbind(PageRecord& page, const Lock& lock);
  /// The page has another storage or name, or lives on the device now: its storage is told anew
  /// what to throw.
  void changed(PageRecord& page, const Lock& lock);

  /// An operator of this thread cannot have these pages: deny() comes, when nobody runs on them.
  void announce_denial(std::span<const Access> accesses, const std::string& why,
                       const Lock& lock) noexcept;
  /// The storages of these pages throw `why` from now on, until allow(). Operators inside the one
  /// that is denied may have them all the same.
  void deny(std::span<const Access> accesses, const std::string& why, const Lock& lock) noexcept;
  void allow(std::span<const Access> accesses, const Lock& lock) noexcept;
  /// Whether a touch of these waits for an operator of another thread that is about to throw: if
  /// they came now it could find some of them, and then others in their place. Before a denial is
  /// in force only those wait for it whom nobody can wait for.
  bool denied_to_others(std::span<const Access> accesses, const Lock& lock) const;
  /// Whether an operator of another thread has been denied the page and has not ended.
  bool denies(const PageRecord& page, const Lock& lock) const noexcept;
  /// …or of this one.
  bool is_denied(const PageRecord& page, const Lock& lock) const noexcept;

  /// From now on every page throws `why`.
  void refuse(std::string why, const Lock& lock) noexcept;
  /// Empty: all is well.
  const std::string& refused(const Lock& /*lock*/) const noexcept { return refused_; }
  /// EngineError if touches are refused.
  void require_not_refused(const Lock& lock) const;

 private:
  /// A page whose storage throws `why`, for an operator of that thread.
  struct Denial {
    const Page* page;
    std::thread::id thread;
    std::string why;
    std::uint32_t outer = 0;  // pins of operators around that one
    bool in_force = false;

    bool mine() const noexcept { return thread == std::this_thread::get_id(); }
  };

  std::string message(const PageRecord& page) const;
  Denial* mine(const Page& page) noexcept;
  bool denied_now(const PageRecord& page) const noexcept;

  const std::string advice_;
  std::string refused_;
  std::vector<Denial> denials_;  // empty, but for moments
};

}  // namespace pagoda::pager

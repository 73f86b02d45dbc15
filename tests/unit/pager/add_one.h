// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "pagoda/pager/pager.h"

namespace pagoda::pager {

/// Makes updates at once: adds one to every byte of a page's home.
class AddOne final : public PendingUpdates {
 public:
  AddOne(Tiers& tiers, Pager& pager) : tiers_(tiers), pager_(pager) {}

  void wait_for_update(Page& page) override {
    const std::lock_guard lock(mutex_);
    const PageSnapshot now = pager_.look(page);
    if (now.version >= now.wanted) return;
    std::vector<std::byte> bytes(page.bytes());
    tiers_.read(Pager::home(page), 0, bytes);
    for (std::byte& value : bytes) value = std::byte(static_cast<unsigned char>(value) + 1);
    tiers_.write(Pager::home(page), 0, bytes);
    pager_.updated(page, now.wanted);
  }
  const std::byte* wait_for_rows(Page& page, std::span<const Range> /*parts*/) override {
    wait_for_update(page);
    return Pager::home(page).data();
  }
  Range kept(const Page& page, Range /*shard*/) override { return {0, page.elements}; }
  void overwritten(Page& page, std::uint64_t begin, std::uint64_t count, const std::byte* before,
                   const std::byte* after) override {
    const std::lock_guard lock(mutex_);
    for (std::uint64_t i = 0; i < count * page.element_size; ++i) {
      if (before[i] != after[i]) changed_[page.id] += 1;
    }
    (void)begin;
  }
  int changed(const Page& page) {
    const std::lock_guard lock(mutex_);
    return changed_[page.id];
  }

 private:
  Tiers& tiers_;
  Pager& pager_;
  std::mutex mutex_;
  std::map<PageId, int> changed_;  // guarded by mutex_
};

}  // namespace pagoda::pager

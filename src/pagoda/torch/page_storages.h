// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/table_use.h"

namespace pagoda::torch {

/// The storages that are pages of one engine, and with them what operators find in StorageTable.
///
/// Any thread: an operator that meets a parameter with another storage exchanges the two. What
/// find() and all() return goes in calls of the engine only.
class PageStorages {
 public:
  /// Null: not a page of this engine.
  PageStorage* find(const c10::StorageImpl* key) const;
  std::vector<PageStorage*> all() const;
  std::size_t size() const;

  /// Operators find it from now on.
  PageStorage& add(std::unique_ptr<PageStorage> storage);
  /// Operators no longer find it; those that already have may still use it.
  std::unique_ptr<PageStorage> take(const c10::StorageImpl* key);
  /// The same, for a thread that cannot wait for those. `dropped`: its page, if that is nobody's
  /// from now on.
  void retire(const c10::StorageImpl* key, pager::Page* dropped);
  std::vector<std::unique_ptr<PageStorage>> take_retired();
  std::vector<pager::Page*> take_dropped();
  /// …of which nobody but this thread uses any more what it found, for a thread that cannot wait.
  std::vector<pager::Page*> take_unused();
  /// Puts back those that must stay for now.
  void keep_dropped(std::vector<pager::Page*> pages);

 private:
  mutable RankedMutex<LockRank::PageStorages> mutex_;
  std::unordered_map<const c10::StorageImpl*, std::unique_ptr<PageStorage>>
      storages_;                                       // guarded by mutex_
  std::vector<std::unique_ptr<PageStorage>> retired_;  // guarded by mutex_
  std::vector<pager::Page*> dropped_;                  // guarded by mutex_
  std::vector<pager::Page*> leaving_;                  // guarded by mutex_: dropped before users_
  TableUse::Grace users_;                              // guarded by mutex_
};

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/page_storages.h"

#include <mutex>
#include <utility>

#include "pagoda/torch/storage_table.h"

namespace pagoda::torch {

PageStorage* PageStorages::find(const c10::StorageImpl* key) const {
  const std::lock_guard lock(mutex_);
  const auto found = storages_.find(key);
  return found == storages_.end() ? nullptr : found->second.get();
}

std::vector<PageStorage*> PageStorages::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<PageStorage*> out;
  out.reserve(storages_.size());
  for (const auto& [key, storage] : storages_) out.push_back(storage.get());
  return out;
}

std::size_t PageStorages::size() const {
  const std::lock_guard lock(mutex_);
  return storages_.size();
}

PageStorage& PageStorages::add(std::unique_ptr<PageStorage> storage) {
  PageStorage& added = *storage;
  const std::lock_guard lock(mutex_);
  storages_[added.key()] = std::move(storage);
  StorageTable::instance().insert(added.key(), added);
  return added;
}

std::unique_ptr<PageStorage> PageStorages::take(const c10::StorageImpl* key) {
  const std::lock_guard lock(mutex_);
  const auto found = storages_.find(key);
  if (found == storages_.end()) return nullptr;
  StorageTable::instance().erase(key);
  auto taken = std::move(found->second);
  storages_.erase(found);
  return taken;
}

void PageStorages::retire(const c10::StorageImpl* key, pager::Page* dropped) {
  auto storage = take(key);
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(storage));
  if (dropped != nullptr) dropped_.push_back(dropped);
}

std::vector<std::unique_ptr<PageStorage>> PageStorages::take_retired() {
  const std::lock_guard lock(mutex_);
  return std::exchange(retired_, {});
}

std::vector<pager::Page*> PageStorages::take_dropped() {
  const std::lock_guard lock(mutex_);
  leaving_.insert(leaving_.end(), dropped_.begin(), dropped_.end());
  dropped_.clear();
  return std::exchange(leaving_, {});
}

std::vector<pager::Page*> PageStorages::take_unused() {
  const std::lock_guard lock(mutex_);
  std::vector<pager::Page*> unused;
  if (!leaving_.empty() && users_.gone()) unused = std::exchange(leaving_, {});
  if (leaving_.empty() && !dropped_.empty()) {
    leaving_ = std::exchange(dropped_, {});
    users_ = {};
    if (users_.gone()) {
      unused.insert(unused.end(), leaving_.begin(), leaving_.end());
      leaving_.clear();
    }
  }
  return unused;
}

void PageStorages::keep_dropped(std::vector<pager::Page*> pages) {
  const std::lock_guard lock(mutex_);
  dropped_.insert(dropped_.end(), pages.begin(), pages.end());
}

}  // namespace pagoda::torch

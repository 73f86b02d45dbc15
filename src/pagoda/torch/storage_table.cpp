// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/storage_table.h"

#include "pagoda/torch/page_storage.h"

namespace pagoda::torch {

StorageTable& StorageTable::instance() {
  static auto* table = new StorageTable();  // never destroyed: operators may run at exit
  return *table;
}

void StorageTable::insert(PageStorage& storage) {
  const std::lock_guard lock(mutex_);
  if (tables_.empty() || 2 * (taken_ + 1) > tables_.back()->entries.size()) grow();
  put(*tables_.back(), storage.key(), &storage);
  ++taken_;
  count_.fetch_add(1, std::memory_order_relaxed);
}

void StorageTable::erase(const PageStorage& storage) noexcept {
  const std::lock_guard lock(mutex_);
  if (tables_.empty()) return;
  Table& table = *tables_.back();
  for (std::size_t at = slot(storage.key()) & table.mask;; at = (at + 1) & table.mask) {
    Entry& entry = table.entries[at];
    const c10::StorageImpl* key = entry.key.load(std::memory_order_relaxed);
    if (key == nullptr) return;
    if (key != storage.key() || entry.value.load(std::memory_order_relaxed) != &storage) continue;
    entry.value.store(nullptr, std::memory_order_release);
    count_.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
}

std::vector<PageStorage*> StorageTable::all() const {
  std::vector<PageStorage*> out;
  const Table* table = table_.load(std::memory_order_acquire);
  if (table == nullptr) return out;
  for (const Entry& entry : table->entries) {
    PageStorage* value = entry.value.load(std::memory_order_acquire);
    if (value != nullptr) out.push_back(value);
  }
  return out;
}

/// The place of a storage that was erased is taken again by the same address only: readers on other
/// keys walk over it.
void StorageTable::put(Table& table, const c10::StorageImpl* key, PageStorage* value) noexcept {
  for (std::size_t at = slot(key) & table.mask;; at = (at + 1) & table.mask) {
    Entry& entry = table.entries[at];
    const c10::StorageImpl* here = entry.key.load(std::memory_order_relaxed);
    if (here != nullptr && here != key) continue;
    entry.value.store(value, std::memory_order_release);
    entry.key.store(key, std::memory_order_release);
    return;
  }
}

void StorageTable::grow() {
  std::size_t size = 1024;
  while (size < 8 * (count_.load(std::memory_order_relaxed) + 1)) size *= 2;
  auto next = std::make_unique<Table>(size);
  taken_ = 0;
  if (!tables_.empty()) {
    for (const Entry& entry : tables_.back()->entries) {
      PageStorage* value = entry.value.load(std::memory_order_relaxed);
      if (value == nullptr) continue;
      put(*next, entry.key.load(std::memory_order_relaxed), value);
      ++taken_;
    }
  }
  table_.store(next.get(), std::memory_order_release);
  tables_.push_back(std::move(next));
}

}  // namespace pagoda::torch

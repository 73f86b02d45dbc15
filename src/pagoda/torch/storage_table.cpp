// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/storage_table.h"

namespace pagoda::torch {

template <class Key, class Value>
ObjectTable<Key, Value>& ObjectTable<Key, Value>::instance() {
  static auto* table = new ObjectTable();
  return *table;
}

template <class Key, class Value>
void ObjectTable<Key, Value>::insert(const Key* key, Value& value) {
  const std::lock_guard lock(mutex_);
  if (tables_.empty() || 2 * (taken_ + 1) > tables_.back()->entries.size()) grow();
  put(*tables_.back(), key, &value);
  ++taken_;
  count_.fetch_add(1, std::memory_order_relaxed);
}

template <class Key, class Value>
void ObjectTable<Key, Value>::erase(const Key* key) noexcept {
  const std::lock_guard lock(mutex_);
  if (tables_.empty()) return;
  Table& table = *tables_.back();
  for (std::size_t at = slot(key) & table.mask;; at = (at + 1) & table.mask) {
    Entry& entry = table.entries[at];
    const Key* here = entry.key.load(std::memory_order_relaxed);
    if (here == nullptr) return;
    if (here != key) continue;
    if (entry.value.exchange(nullptr, std::memory_order_acq_rel) == nullptr) return;
    count_.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
}

/// The place of an object that was erased is taken again by the same address only: readers on other
/// keys walk over it.
template <class Key, class Value>
void ObjectTable<Key, Value>::put(Table& table, const Key* key, Value* value) noexcept {
  for (std::size_t at = slot(key) & table.mask;; at = (at + 1) & table.mask) {
    Entry& entry = table.entries[at];
    const Key* here = entry.key.load(std::memory_order_relaxed);
    if (here != nullptr && here != key) continue;
    entry.value.store(value, std::memory_order_release);
    entry.key.store(key, std::memory_order_release);
    return;
  }
}

template <class Key, class Value>
void ObjectTable<Key, Value>::grow() {
  std::size_t size = 1024;
  while (size < 8 * (count_.load(std::memory_order_relaxed) + 1)) size *= 2;
  auto next = std::make_unique<Table>(size);
  taken_ = 0;
  if (!tables_.empty()) {
    for (const Entry& entry : tables_.back()->entries) {
      Value* value = entry.value.load(std::memory_order_relaxed);
      if (value == nullptr) continue;
      put(*next, entry.key.load(std::memory_order_relaxed), value);
      ++taken_;
    }
  }
  table_.store(next.get(), std::memory_order_release);
  tables_.push_back(std::move(next));
}

template class ObjectTable<c10::StorageImpl, PageStorage>;
template class ObjectTable<c10::TensorImpl, AttachedParameter>;

}  // namespace pagoda::torch

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
  Entry& place = place_of(*tables_.back(), key);
  if (place.key.load(std::memory_order_relaxed) == nullptr) ++taken_;
  put(place, key, &value);
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
    free_places(table, at);
    return;
  }
}

/// Where a reader stops at the next place, it may as well stop at this one, whose object was
/// erased, and so on before it: where objects come and go the table does not fill up.
template <class Key, class Value>
void ObjectTable<Key, Value>::free_places(Table& table, std::size_t last) noexcept {
  if (table.entries[(last + 1) & table.mask].key.load(std::memory_order_relaxed) != nullptr) return;
  for (std::size_t at = last;; at = (at - 1) & table.mask) {
    Entry& entry = table.entries[at];
    if (entry.key.load(std::memory_order_relaxed) == nullptr ||
        entry.value.load(std::memory_order_relaxed) != nullptr) {
      return;
    }
    entry.key.store(nullptr, std::memory_order_release);
    --taken_;
  }
}

/// Its own, or the first of one that was erased, or one that nobody has had.
template <class Key, class Value>
auto ObjectTable<Key, Value>::place_of(Table& table, const Key* key) noexcept -> Entry& {
  Entry* erased = nullptr;
  for (std::size_t at = slot(key) & table.mask;; at = (at + 1) & table.mask) {
    Entry& entry = table.entries[at];
    const Key* here = entry.key.load(std::memory_order_relaxed);
    if (here == key) return entry;
    if (here == nullptr) return erased != nullptr ? *erased : entry;
    if (erased == nullptr && entry.value.load(std::memory_order_relaxed) == nullptr) {
      erased = &entry;
    }
  }
}

/// Readers on other keys walk over a place, whoever has it; one on the key that had it before must
/// not take the value for its own.
template <class Key, class Value>
void ObjectTable<Key, Value>::put(Entry& entry, const Key* key, Value* value) noexcept {
  if (entry.key.load(std::memory_order_relaxed) != nullptr) {
    entry.key.store(nobody(), std::memory_order_relaxed);
  }
  entry.value.store(value, std::memory_order_release);
  entry.key.store(key, std::memory_order_release);
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
      const Key* key = entry.key.load(std::memory_order_relaxed);
      put(place_of(*next, key), key, value);
      ++taken_;
    }
  }
  table_.store(next.get(), std::memory_order_release);
  tables_.push_back(std::move(next));
}

template class ObjectTable<c10::StorageImpl, PageStorage>;
template class ObjectTable<c10::TensorImpl, AttachedParameter>;

}  // namespace pagoda::torch

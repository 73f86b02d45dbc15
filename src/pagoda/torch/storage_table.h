// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace c10 {
struct StorageImpl;
}

namespace pagoda::torch {

class PageStorage;

/// Which storages are pages: of all engines of the process, for the observer.
///
/// find() is called for every tensor of every operator, from any thread, and takes no lock: a table
/// is replaced by a larger one as a whole, and replaced ones are kept (they are few, and a reader
/// may still be in one). A page's entry goes only when its storage has died or its engine ends, and
/// then nobody can be looking for it.
class StorageTable {
 public:
  static StorageTable& instance();

  PageStorage* find(const c10::StorageImpl* storage) const noexcept {
    const Table* table = table_.load(std::memory_order_acquire);
    if (table == nullptr) return nullptr;
    for (std::size_t at = slot(storage) & table->mask;; at = (at + 1) & table->mask) {
      const c10::StorageImpl* key = table->entries[at].key.load(std::memory_order_acquire);
      if (key == storage) return table->entries[at].value.load(std::memory_order_acquire);
      if (key == nullptr) return nullptr;
    }
  }
  /// Whether there is any page at all.
  bool empty() const noexcept { return count_.load(std::memory_order_relaxed) == 0; }

  void insert(PageStorage& storage);
  void erase(const PageStorage& storage) noexcept;
  /// For a child after fork: every page.
  std::vector<PageStorage*> all() const;

 private:
  struct Entry {
    std::atomic<const c10::StorageImpl*> key{nullptr};
    std::atomic<PageStorage*> value{nullptr};  // null: erased, the place is kept
  };
  struct Table {
    explicit Table(std::size_t size) : mask(size - 1), entries(size) {}
    std::size_t mask;
    std::vector<Entry> entries;
  };

  static std::size_t slot(const c10::StorageImpl* storage) noexcept {
    // Addresses are multiples of 16, and neighbours are common.
    return (reinterpret_cast<std::size_t>(storage) >> 4) * 0x9E3779B97F4A7C15U >> 20;
  }
  static void put(Table& table, const c10::StorageImpl* key, PageStorage* value) noexcept;
  void grow();

  std::atomic<Table*> table_{nullptr};
  std::atomic<std::size_t> count_{0};
  mutable std::mutex mutex_;                    // for writers
  std::vector<std::unique_ptr<Table>> tables_;  // guarded by mutex_; the last one is current
  std::size_t taken_ = 0;                       // guarded by mutex_: places used, erased ones too
};

}  // namespace pagoda::torch

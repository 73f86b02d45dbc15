// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "pagoda/base/ranked_mutex.h"

namespace c10 {
struct StorageImpl;
struct TensorImpl;
}  // namespace c10

namespace pagoda::torch {

class PageStorage;
struct AttachedParameter;

/// What the observer knows of torch's objects, by their address: of all engines of the process.
///
/// find() is called for every tensor of every operator, from any thread, and takes no lock: a table
/// is replaced by a larger one as a whole, and replaced ones are kept (they are few, and a reader
/// may still be in one). An entry goes when its object has died, and then nobody can be looking for
/// it, or when it becomes a plain one or its engine ends: TableUse says who may still use it.
template <class Key, class Value>
class ObjectTable {
 public:
  /// Never destroyed: operators may run at exit.
  static ObjectTable& instance();

  Value* find(const Key* key) const noexcept {
    const Table* table = table_.load(std::memory_order_acquire);
    if (table == nullptr) return nullptr;
    for (std::size_t at = slot(key) & table->mask;; at = (at + 1) & table->mask) {
      const Entry& entry = table->entries[at];
      const Key* here = entry.key.load(std::memory_order_acquire);
      if (here == nullptr) return nullptr;
      if (here != key) continue;
      Value* value = entry.value.load(std::memory_order_acquire);
      // Unless the place of an erased one was taken by another one in between.
      if (entry.key.load(std::memory_order_relaxed) == key) return value;
    }
  }
  /// Whether there is anything at all.
  bool empty() const noexcept { return count_.load(std::memory_order_relaxed) == 0; }

  /// How many tables it has outgrown.
  std::size_t outgrown() const {
    const std::lock_guard lock(mutex_);
    return tables_.empty() ? 0 : tables_.size() - 1;
  }

  void insert(const Key* key, Value& value);
  void erase(const Key* key) noexcept;
  /// Around a fork: the child gets no table that another thread was just changing. The child
  /// forgets everything; `each` sees it first.
  void before_fork() { mutex_.lock(); }
  void after_fork() noexcept { mutex_.unlock(); }
  template <class Each>
  void forget_all(const Each& each) {
    Table* table = table_.load(std::memory_order_acquire);
    for (std::size_t at = 0; table != nullptr && at <= table->mask; ++at) {
      Value* value = table->entries[at].value.exchange(nullptr, std::memory_order_acq_rel);
      if (value != nullptr) each(*value);
    }
    count_.store(0, std::memory_order_relaxed);
  }

 private:
  struct Entry {
    std::atomic<const Key*> key{nullptr};
    std::atomic<Value*> value{nullptr};  // null: erased
  };
  struct Table {
    explicit Table(std::size_t size) : mask(size - 1), entries(size) {}
    std::size_t mask;
    std::vector<Entry> entries;
  };

  // A fork takes both tables' locks, in this order.
  static constexpr LockRank kRank =
      std::is_same_v<Key, c10::StorageImpl> ? LockRank::StorageTable : LockRank::ParameterTable;

  static std::size_t slot(const Key* key) noexcept {
    // Addresses are multiples of 16, and neighbours are common.
    return (reinterpret_cast<std::size_t>(key) >> 4) * 0x9E3779B97F4A7C15U >> 20;
  }
  /// What a place has for a key while another one takes it.
  static const Key* nobody() noexcept {
    static const char place = 0;
    return reinterpret_cast<const Key*>(&place);
  }
  void free_places(Table& table, std::size_t last) noexcept;
  static Entry& place_of(Table& table, const Key* key) noexcept;
  static void put(Entry& entry, const Key* key, Value* value) noexcept;
  void grow();

  std::atomic<Table*> table_{nullptr};
  std::atomic<std::size_t> count_{0};
  mutable RankedMutex<kRank> mutex_;            // for writers
  std::vector<std::unique_ptr<Table>> tables_;  // guarded by mutex_; the last one is current
  std::size_t taken_ = 0;                       // guarded by mutex_: places with a key
};

/// Which storages are pages.
using StorageTable = ObjectTable<c10::StorageImpl, PageStorage>;
/// Which tensors are parameters that are trained: one whose storage is no page was given another.
using ParameterTable = ObjectTable<c10::TensorImpl, AttachedParameter>;

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
// The table that every operator asks, without a lock. It only compares addresses, so that this test
// needs no torch, and the thread sanitizer sees all of it.
#include "pagoda/torch/storage_table.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/torch/table_use.h"

namespace pagoda::torch {
namespace {

using Table = ObjectTable<c10::StorageImpl, PageStorage>;

/// Addresses that nothing else has, 16 bytes apart as torch's objects are at least.
struct Place {
  alignas(16) std::byte bytes[16];
};

const c10::StorageImpl* key(const Place& place) {
  return reinterpret_cast<const c10::StorageImpl*>(&place);
}

PageStorage* value(Place& place) {
  return reinterpret_cast<PageStorage*>(&place);
}

class StorageTableOf : public ::testing::Test {
 protected:
  void insert(std::size_t key_at, std::size_t value_at) {
    table_.insert(key(keys_[key_at]), *value(values_[value_at]));
  }

  static constexpr std::size_t kPlaces = 6000;

  Table table_;
  std::vector<Place> keys_ = std::vector<Place>(kPlaces);
  std::vector<Place> values_ = std::vector<Place>(kPlaces);
};

TEST_F(StorageTableOf, FindsWhatIsThereAndNothingElse) {
  EXPECT_TRUE(table_.empty());
  EXPECT_EQ(table_.find(key(keys_[0])), nullptr);
  for (std::size_t i = 0; i < kPlaces; i += 2) insert(i, i);  // grows on the way
  EXPECT_FALSE(table_.empty());
  for (std::size_t i = 0; i < kPlaces; ++i) {
    EXPECT_EQ(table_.find(key(keys_[i])), i % 2 == 0 ? value(values_[i]) : nullptr);
  }
  for (std::size_t i = 0; i < kPlaces; i += 2) table_.erase(key(keys_[i]));
  table_.erase(key(keys_[0]));
  table_.erase(key(keys_[1]));
  EXPECT_TRUE(table_.empty());
  for (std::size_t i = 0; i < kPlaces; ++i) EXPECT_EQ(table_.find(key(keys_[i])), nullptr);
  insert(4, 5);  // an address that has come again, with another object
  EXPECT_EQ(table_.find(key(keys_[4])), value(values_[5]));
  int forgotten = 0;
  table_.before_fork();
  table_.forget_all([&](PageStorage&) { ++forgotten; });
  table_.after_fork();
  EXPECT_EQ(forgotten, 1);
  EXPECT_TRUE(table_.empty());
  EXPECT_EQ(table_.find(key(keys_[4])), nullptr);
}

TEST_F(StorageTableOf, DoesNotGrowWhereObjectsComeAndGo) {
  insert(0, 0);
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 1; i < kPlaces; ++i) {
      insert(i, i);
      table_.erase(key(keys_[i]));
      ASSERT_EQ(table_.find(key(keys_[i])), nullptr);
      ASSERT_EQ(table_.find(key(keys_[0])), value(values_[0]));
    }
  }
  EXPECT_LE(table_.outgrown(), 1U);
}

TEST_F(StorageTableOf, IsReadWhileItGrows) {
  constexpr std::size_t kStay = 500;
  for (std::size_t i = 0; i < kStay; ++i) insert(i, i);
  std::atomic<bool> ended = false;
  std::atomic<std::size_t> inserted = kStay;  // of the writer's, each for good
  std::atomic<std::size_t> wrong = 0;
  std::vector<std::jthread> readers;
  for (std::size_t r = 0; r < 3; ++r) {
    readers.emplace_back([&, r] {
      while (!ended.load()) {
        const std::size_t known = inserted.load();
        for (std::size_t i = r; i < kPlaces; i += 7) {
          const PageStorage* found = table_.find(key(keys_[i]));
          const bool right = found == value(values_[i]) || (i >= known && found == nullptr);
          if (!right) ++wrong;
        }
      }
    });
  }
  std::jthread coming([&] {  // others come and go, under addresses of their own
    std::vector<Place> places(64);
    while (!ended.load()) {
      for (Place& place : places) table_.insert(key(place), *value(place));
      for (Place& place : places) {
        if (table_.find(key(place)) != value(place)) ++wrong;
        table_.erase(key(place));
        if (table_.find(key(place)) != nullptr) ++wrong;
      }
    }
  });
  for (std::size_t i = kStay; i < kPlaces; ++i) {
    insert(i, i);
    inserted.store(i + 1);
  }
  ended.store(true);
  readers.clear();
  coming.join();
  EXPECT_EQ(wrong, 0U);
}

/// Something that is found in a table, and ends after it was erased.
struct Entry {
  std::atomic<bool> alive{true};
};

TEST(TableUseOf, AThreadKnowsWhetherOthersAreGone) {
  TableUse outer;
  outer.enter();
  TableUse inner;
  inner.enter();
  EXPECT_TRUE(TableUse::Grace().gone());
  TableUse::Grace grace;
  bool gone = true;
  std::jthread([&] { gone = grace.gone(); }).join();
  EXPECT_FALSE(gone);
  inner.leave();
  std::jthread([&] { gone = grace.gone(); }).join();
  EXPECT_FALSE(gone);
  outer.leave();
  std::jthread([&] { gone = grace.gone(); }).join();
  EXPECT_TRUE(gone);
}

TEST(TableUseOf, ThoseWhoCameLaterAreNotWaitedFor) {
  auto one = std::make_unique<TableUse>();
  one->enter();
  TableUse::Grace grace;
  bool gone = true;
  const auto look = [&] { std::jthread([&] { gone = grace.gone(); }).join(); };
  look();
  // There is never nobody.
  for (int looks = 0; !gone; ++looks) {
    ASSERT_LT(looks, 4);
    auto next = std::make_unique<TableUse>();
    next->enter();
    one = std::move(next);
    look();
  }
}

TEST(TableUseOf, AnyEntryIsOverBeforeItEnds) {
  constexpr std::size_t kClosers = 4;
  constexpr int kRounds = 3000;
  std::array<std::atomic<Entry*>, kClosers> table{};
  std::atomic<bool> stop{false};
  std::atomic<int> ended_in_use{0};
  std::vector<std::jthread> users;
  for (int i = 0; i < 2; ++i) {
    users.emplace_back([&] {
      while (!stop.load()) {
        for (auto& place : table) {
          if (place.load() == nullptr) continue;
          TableUse use;
          use.enter();
          const Entry* found = place.load();  // what was found before may have gone
          if (found == nullptr) continue;
          std::this_thread::yield();
          if (!found->alive.load()) ++ended_in_use;
        }
      }
    });
  }
  {
    std::vector<std::jthread> closers;
    for (auto& place : table) {
      closers.emplace_back([&place] {
        std::vector<std::unique_ptr<Entry>> ended;  // not freed: the check above reads them
        for (int round = 0; round < kRounds; ++round) {
          Entry& entry = *ended.emplace_back(std::make_unique<Entry>());
          place.store(&entry);
          std::this_thread::yield();
          place.store(nullptr);
          TableUse::wait_for_all();
          entry.alive.store(false);
        }
      });
    }
  }
  stop.store(true);
  users.clear();
  EXPECT_EQ(ended_in_use.load(), 0);
}

}  // namespace
}  // namespace pagoda::torch

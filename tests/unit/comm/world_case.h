// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/comm/world.h"

namespace pagoda::comm {

using Worlds = std::vector<std::shared_ptr<World>>;

/// A kind of world and a number of ranks, which are threads here. Each binary has its own list:
/// cases_here.cpp, and one over Gloo in ../torch.
struct WorldCase {
  std::string name;
  int ranks;
  Worlds (*make)(int ranks);
};
std::vector<WorldCase> world_cases();

inline void PrintTo(const WorldCase& world, std::ostream* out) {
  *out << world.name;
}

inline std::string world_case_name(const ::testing::TestParamInfo<WorldCase>& info) {
  return info.param.name;
}

/// Runs `body(r)` for every rank, each on a thread of its own, and throws what the first to fail
/// threw.
inline void on_ranks(int ranks, const std::function<void(int)>& body) {
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

/// The worlds of a case, and groups over them.
class OnWorlds : public ::testing::TestWithParam<WorldCase> {
 protected:
  using Groups = std::vector<std::unique_ptr<Group>>;

  void SetUp() override { worlds_ = GetParam().make(ranks()); }

  int ranks() const { return GetParam().ranks; }
  World& world(int rank) { return *worlds_[static_cast<std::size_t>(rank)]; }

  Groups make_groups(const std::string& name) {
    Groups groups(worlds_.size());
    on_ranks(ranks(),
             [&](int r) { groups[static_cast<std::size_t>(r)] = world(r).make_group(name); });
    return groups;
  }

  /// Runs body(group) for every rank at once.
  static void on_groups(const Groups& groups, const std::function<void(Group&)>& body) {
    on_ranks(static_cast<int>(groups.size()),
             [&](int r) { body(*groups[static_cast<std::size_t>(r)]); });
  }

  Worlds worlds_;
};

/// Bytes that tell where they come from. They repeat after a prime number of bytes.
inline std::vector<std::byte> pattern(std::size_t bytes, int from, int to = 0, int round = 0) {
  constexpr std::size_t kPeriod = 4093;
  std::vector<std::byte> data(bytes);
  for (std::size_t i = 0; i < std::min(bytes, kPeriod); ++i) {
    data[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(from * 31 + to * 5 + round));
  }
  for (std::size_t i = kPeriod; i < bytes; i += kPeriod) {
    std::memcpy(&data[i], data.data(), std::min(kPeriod, bytes - i));
  }
  return data;
}

/// EXPECT_EQ would compare byte by byte, for ever under a sanitizer.
inline bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace pagoda::comm

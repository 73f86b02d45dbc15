// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/pager/page.h"

namespace pagoda::torch {

/// Which pages the forward of each custom autograd function has used.
///
/// A custom function may run a backward pass of its own in its backward, as a reentrant checkpoint
/// does: then what its forward has used gets a gradient there, which the graph does not show
/// (docs/notes/passes.md). One for the process; any thread.
class CustomFunctions {
 public:
  using Pages = std::vector<const pager::Page*>;  // ascending

  /// An application of a function, and the node of its backward: autograd numbers the nodes that a
  /// thread makes.
  struct Key {
    std::uint64_t thread = 0;
    std::int64_t sequence = 0;
    bool operator==(const Key&) const = default;
  };

  static CustomFunctions& instance();

  /// A function's forward runs on this thread from here to ends(). They nest.
  static void begins(Key key);
  /// An operator on this thread uses the page. Every touch pays for this one.
  static void uses(const pager::Page& page) {
    if (running != 0) note(page);
  }
  void ends();

  /// Around a fork: a child starts with none.
  void before_fork();
  void after_fork(bool in_child);

  /// Null: its forward was not seen, or is forgotten by now.
  std::shared_ptr<const Pages> used_by(Key key) const;

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return std::hash<std::uint64_t>()(key.thread * 0x9E3779B97F4A7C15U ^
                                        static_cast<std::uint64_t>(key.sequence));
    }
  };
  /// What is remembered: applications, and pages of all of them. Of older ones anything is assumed.
  static constexpr std::size_t kMost = std::size_t{1} << 16U;
  static constexpr std::size_t kMostPages = std::size_t{1} << 20U;

  static void note(const pager::Page& page);

  static thread_local std::size_t running;  // forwards on this thread, one inside the other

  mutable RankedMutex<LockRank::CustomFunctions> mutex_;
  std::unordered_map<Key, std::shared_ptr<const Pages>, Hash> used_;  // guarded by mutex_
  std::deque<Key> oldest_;                                            // guarded by mutex_
  std::size_t pages_ = 0;                                             // guarded by mutex_
};

}  // namespace pagoda::torch

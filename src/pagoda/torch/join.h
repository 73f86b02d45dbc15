// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/clock.h"
#include "pagoda/comm/world.h"

namespace pagoda::torch {

class StoreLost;

/// When a join has to be over. A plain value.
class JoinDeadline {
 public:
  /// It begins now.
  explicit JoinDeadline(std::chrono::milliseconds limit);

  /// EngineError after an interrupt_joins(): "interrupted while it waited for rank 1 to connect".
  void require_not_interrupted(std::string_view awaited) const;
  bool passed() const noexcept { return left().count() <= 0; }
  std::chrono::milliseconds left() const noexcept;
  std::chrono::milliseconds limit() const noexcept { return limit_; }
  Nanos began() const noexcept { return began_; }

 private:
  Nanos began_;
  std::chrono::milliseconds limit_;
  unsigned interrupts_;  // before it began
};

/// This rank's coming together with the others, from the start of an engine until all have agreed
/// ("Joining" in docs/notes/communication.md). Whoever waits meanwhile calls look(), which throws
/// when the deadline has passed, a rank has given up, or its process has ended.
///
/// Used by the thread that makes the engine.
class Join {
 public:
  /// `place`: where these processes may have met before; empty: nowhere. `world` outlives it.
  Join(comm::World& world, std::string place);
  /// Other processes may meet there from now on.
  static void forget(const std::string& place);

  /// Lets the others see whose process this is.
  void announce();
  /// After `patience` a warning names a rank that has not come.
  void begin(std::chrono::milliseconds patience, JoinDeadline deadline);
  bool begun() const noexcept { return deadline_.has_value(); }
  const JoinDeadline& deadline() const { return *deadline_; }
  /// All ranks are there: the others stop monitoring this one.
  void finish();

  /// Returns when all ranks have come to `what`.
  void meet(const std::string& what);
  void look();
  /// The same for ranks that are connected: they hear of each other's ends by that.
  void look_at_clock();
  /// The connections between the ranks have failed: throws who is to blame, once that is known.
  [[noreturn]] void find_lost_rank();
  /// The others throw `story` at their next look.
  void give_up(std::string_view story);
  /// Whether that rank has announced itself.
  bool is_known(int rank);

 private:
  struct Peer {
    std::string process;  // its mark; empty: not known
    std::string beat;     // the last one seen; empty: none
    Nanos changed = 0;    // when that was seen first
  };

  void put(const std::string& key, std::string_view value);
  std::optional<std::string> get(const std::string& key);
  [[noreturn]] void throw_lost_store(const StoreLost& lost) const;
  [[noreturn]] void throw_lost(int rank, std::string_view how) const;
  void post(std::string_view beat);
  void read(int rank);
  bool is_silent(int rank, std::chrono::nanoseconds limit);
  void require_nobody_gave_up();
  void require_processes();
  void require_answers();
  void require_time();
  void warn_of_missing();

  comm::World& world_;
  const std::string place_;
  std::vector<Peer> peers_;
  std::optional<JoinDeadline> deadline_;
  std::chrono::milliseconds patience_{60'000};
  int missing_ = -1;  // the rank that has not come
  bool warned_ = false;
  int next_ = 0;        // the rank to read of
  unsigned beats_ = 0;  // of this rank
  Nanos beaten_ = 0;    // when the last one was
};

}  // namespace pagoda::torch

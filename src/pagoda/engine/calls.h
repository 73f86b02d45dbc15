// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pagoda/engine/attached_model.h"
#include "pagoda/engine/collective.h"
#include "pagoda/engine/early_updates.h"
#include "pagoda/engine/rank_status.h"
#include "pagoda/engine/ranks.h"
#include "pagoda/engine/rules.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/pager/pager.h"

namespace pagoda::engine {

/// The collective calls of a rank. Each begins with a meeting: every rank says what it does, and
/// learns what all do ("Every collective call says what it is" in docs/notes/communication.md). One
/// thread at a time.
class Calls {
 public:
  /// What calls are about, for as long as they are made.
  struct Parts {
    const io::OwnerProcess& owner;
    const Rules& rules;
    Ranks& ranks;
    pager::Pager& pager;
    AttachedModel& model;
    EarlyUpdates& early;
    /// Tells the other ranks what this one does, and returns what each of them does, once all
    /// gradients have been summed (Reducer::meet).
    std::function<std::vector<Collective>(Collective)> meet;
  };

  explicit Calls(Parts parts) : parts_(std::move(parts)) {}

  /// What this rank says when it makes the call. Not while attach() or release() changes the model.
  Collective in(Call call) const;
  /// "in step() 5": by any thread, at any time.
  std::string where_in(Call call) const;

  /// Begins a call: returns what all ranks do, when all gradients are added up.
  Collective meet(Collective mine);
  /// The same for a call that `may` refuses on some ranks, by a UserError: then all throw it, and
  /// none has done anything.
  void meet_unless_refused(Collective mine, const std::function<void()>& may);
  /// What each rank has said in the call under way.
  std::span<const Collective> met() const noexcept { return met_; }
  /// Whether some rank has refused it.
  bool refused_by_any() const noexcept;
  /// What the ranks that have refused it say is thrown by all. `mine`: null, if this one has not.
  void throw_refusal(const std::exception_ptr& mine);

  /// A collective call of somebody else's, which Runtime::begin_call() tells of.
  void begin(std::string label, const std::string& name, const std::string& argument);
  void end(const std::string& error);
  /// What this rank does by itself, which Runtime::begin_work() tells of.
  void begin_work(std::string label);
  void end_work() { theirs_.reset(); }

  /// `call` would take one rank's view of a parameter out of the engine: what the others have not
  /// written must not be in it.
  void require_same_writes(std::string_view call);

 private:
  void check() const;
  bool alone() const noexcept { return parts_.ranks.alone(); }

  const Parts parts_;
  std::vector<Collective> met_;
  std::string label_;                           // of somebody else's call
  std::unique_ptr<RankStatus::InCall> theirs_;  // that call, or work
};

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/calls.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/engine/agreement.h"
#include "pagoda/engine/user_writes.h"

namespace pagoda::engine {

void Calls::check() const {
  parts_.owner.require("an engine");
  parts_.ranks.failure().check();
}

std::string Calls::where_in(Call call) const {
  Collective out;
  out.call = call;
  out.steps = parts_.ranks.status().steps();
  return out.where();
}

Collective Calls::in(Call call) const {
  Collective out;
  out.call = call;
  out.steps = parts_.ranks.status().steps();
  out.rules = parts_.rules.hash();
  if (!alone()) out.writes = UserWrites(parts_.pager, parts_.model.pages()).hash();
  return out;
}

Collective Calls::meet(Collective mine) {
  check();
  const Call call = mine.call;
  if (call == Call::Step || call == Call::Join) parts_.early.step_waits(parts_.rules.now());
  try {
    met_ = parts_.meet(std::move(mine));
    parts_.model.take_joined();
    return call_of_all(met_);
  } catch (...) {
    parts_.ranks.failure().fail_and_throw();
  }
}

void Calls::meet_unless_refused(Collective mine, const std::function<void()>& may) {
  check();
  std::exception_ptr refusal;
  try {
    may();
  } catch (const UserError&) {
    if (alone()) throw;
    refusal = std::current_exception();
  }
  mine.refused = refusal != nullptr;
  meet(std::move(mine));
  if (refused_by_any()) throw_refusal(refusal);
}

bool Calls::refused_by_any() const noexcept {
  return std::any_of(met_.begin(), met_.end(), [](const Collective& one) { return one.refused; });
}

void Calls::throw_refusal(const std::exception_ptr& mine) {
  try {
    all_or_none(parts_.ranks.control(), [&] {
      if (mine != nullptr) std::rethrow_exception(mine);
    });
  } catch (const NoneDid& stopped) {
    std::rethrow_exception(stopped.error);
  } catch (...) {
    parts_.ranks.failure().fail_and_throw();
  }
}

void Calls::begin(std::string label, const std::string& name, const std::string& argument) {
  label_ = std::move(label);
  Collective mine = in(Call::Barrier);
  mine.label = label_;
  theirs_.reset();  // the one before leaves first
  theirs_ = std::make_unique<RankStatus::InCall>(parts_.ranks.status(), mine.where());
  meet(std::move(mine));
  if (alone()) return;
  try {
    if (!name.empty()) {
      Settings arguments;
      arguments.add(name, argument);
      arguments.require_equal(*parts_.ranks.control());
    }
    require_same_writes(fmt::format("{}()", label_));
  } catch (const UserError&) {  // on all ranks, or the engine has failed
    theirs_.reset();
    throw;
  } catch (...) {
    parts_.ranks.failure().fail_and_throw();
  }
}

void Calls::begin_work(std::string label) {
  check();
  Collective mine = in(Call::Barrier);
  mine.label = std::move(label);
  theirs_.reset();  // the one before leaves first
  theirs_ = std::make_unique<RankStatus::InCall>(parts_.ranks.status(), mine.where());
}

void Calls::require_same_writes(std::string_view call) {
  if (alone()) return;
  try {
    // In the window step() finds or undoes them.
    if (!parts_.early.in_window()) parts_.pager.find_raw_writes();
    const UserWrites writes(parts_.pager, parts_.model.pages());
    std::uint64_t any = writes.any() ? 1 : 0;
    parts_.ranks.control()->all_reduce_max({&any, 1});
    if (any != 0) writes.require_same(*parts_.ranks.control(), call);
  } catch (const StepRefused&) {  // on all ranks
    throw;
  } catch (...) {
    parts_.ranks.failure().fail_and_throw();
  }
}

void Calls::end(const std::string& error) {
  const auto inside = std::exchange(theirs_, nullptr);
  Collective mine = in(Call::Barrier);
  mine.label = label_;
  meet(std::move(mine));
  try {
    all_or_none(parts_.ranks.control(), [&] {
      if (!error.empty()) throw UserError(error);
    });
  } catch (const NoneDid& stopped) {  // this rank's caller has its own error
    if (error.empty()) std::rethrow_exception(stopped.error);
  } catch (...) {
    parts_.ranks.failure().fail_and_throw();
  }
}

}  // namespace pagoda::engine

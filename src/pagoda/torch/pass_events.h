// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/passes.h"

namespace pagoda::torch {

/// What an engine is told of backward passes that reach its parameters, and which pass of the
/// user's (a plain loss.backward()) is a micro-batch that is under way.
///
/// Called by autograd, on its threads. A pass may end later than the engine: then nobody is told.
/// Any thread.
class PassEvents final : public PassListener, public std::enable_shared_from_this<PassEvents> {
 public:
  struct Handlers {
    /// As PassListener says; does not throw.
    std::function<void(const CustomFunctions::Pages* pages)> function_ended;
    /// The user's pass that is a micro-batch is over. What it throws is thrown by the pass.
    std::function<void()> micro_batch_ended;
  };

  explicit PassEvents(Handlers handlers);

  void function_ended(const CustomFunctions::Pages* pages) noexcept override;
  void pass_ended(int pass) override;
  void pass_failed(int pass) noexcept override;
  /// The engine ends: waits for calls under way.
  void end();

  /// The user's pass that is a micro-batch; kNoPass: none is under way.
  int micro_batch() const;
  /// The pass that this thread runs is a micro-batch, or part of the one under way. `begins` is
  /// called where it is a new one, before anybody else finds it under way. Returns take_failure().
  bool join(const std::function<void()>& begins);
  /// Whether a micro-batch has failed; true once for each time that one has.
  bool take_failure();
  /// The same where none is under way. False otherwise: a pass inside it that failed is its affair.
  bool take_failure_of_last();
  /// The same where none can be under way: one that has not told its end has failed.
  bool take_failure_of_all();

 private:
  class Call;

  bool close(int pass, bool with_error);

  const Handlers handlers_;
  mutable RankedMutex<LockRank::PlainPasses> mutex_;
  Condition changed_;
  int micro_batch_ = kNoPass;  // guarded by mutex_
  bool failed_ = false;        // guarded by mutex_: the one before ended with an error
  bool ended_ = false;         // guarded by mutex_: nobody is told any more
  unsigned calls_ = 0;         // guarded by mutex_: of handlers, under way
};

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/torch/custom_functions.h"

namespace at {
struct ObserverContext;
}
namespace torch::autograd {
struct Node;
}

namespace pagoda::torch {

/// What is told of a backward pass, on the thread that runs it.
class PassListener {
 public:
  virtual ~PassListener() = default;
  /// The backward of a custom function is over, in the pass that is listened to or inside it:
  /// gradients that waited for it may be complete. `pages`: what its forward had used; null:
  /// anything.
  virtual void function_ended(const CustomFunctions::Pages* pages) noexcept = 0;
  /// What it throws is thrown by the pass.
  virtual void pass_ended(int pass) = 0;
  /// It ended with an error. Any thread, later than the error perhaps.
  virtual void pass_failed(int pass) noexcept = 0;
};

/// The backward passes under way in the process, as autograd runs them: which are inside which, and
/// what is still to come in each. See docs/notes/passes.md.
///
/// One for the process; the observer tells it when autograd begins and ends the evaluation of a
/// node, hooks included. Any thread.
class Passes {
 public:
  static Passes& instance();

  /// The observer's: on the thread that evaluates the node, one evaluation inside the other.
  /// `name`: the node's. (To ask the node itself takes Python's lock.)
  std::unique_ptr<at::ObserverContext> node_begins(std::string_view name);
  void node_ends(at::ObserverContext& context) noexcept;
  /// Around a fork: a child starts with none.
  void before_fork();
  void after_fork(bool in_child);

  /// Whether `other` is under way, and neither inside the pass that this thread runs nor around it.
  bool runs_beside(int other) const;
  /// Whether this thread runs `pass`, or one inside it.
  static bool runs_inside(int pass);
  /// Listens to the pass that this thread runs, or to the outermost of those around it, until that
  /// ends; returns its number.
  int listen(const std::weak_ptr<PassListener>& listener);
  /// The parameter's gradient has been accumulated in the pass that this thread runs: is it
  /// complete?
  bool accumulated(const at::Tensor& parameter, const pager::Page& page);
  bool is_complete(const at::Tensor& parameter, const pager::Page& page) const;
  bool under_way(int pass) const;
  /// The loss of the pass that this thread runs, or of one around it, was multiplied by a scale
  /// that is not the engine's.
  void mark_scaled();
  bool is_scaled() const;
  /// What forward says of the functions that are running on this thread is not all: from now on
  /// those of their names may use anything, and gradients wait for their end. False: none is
  /// running.
  bool distrust_running_functions();

 private:
  using Node = ::torch::autograd::Node;
  using Lock = RankedLock<LockRank::Passes>;
  /// What of a node matters here.
  enum class Kind : std::uint8_t { Plain, Accumulation, Python, Cpp };
  struct Pass;
  struct Ending;
  struct Evaluation;
  struct Running;

  /// What this thread is in; null: no pass that is known.
  static std::shared_ptr<Evaluation> current_evaluation();
  void begin(int number);
  void pass_ends(int number);
  void pass_fails(int number) noexcept;
  Kind kind_of(const Node& node, const Lock& lock);
  void add_function(Pass& pass, const Node& node, Kind kind, bool distrusted, const Lock& lock);
  const Pass* pass_around(const Pass& pass, const Lock& lock) const;
  int outermost(int pass, const Lock& lock) const;
  bool is_complete(const Node* accumulation, const pager::Page& page, const Lock& lock) const;
  std::vector<std::weak_ptr<PassListener>> take_listeners(int pass);

  mutable RankedMutex<LockRank::Passes> mutex_;
  std::unordered_map<int, std::unique_ptr<Pass>> passes_;      // guarded by mutex_
  std::unordered_map<std::type_index, Kind> kinds_;            // guarded by mutex_
  std::unordered_map<std::type_index, bool> cpp_runs_passes_;  // guarded by mutex_; of those seen
  std::unordered_set<std::string> distrusted_;                 // guarded by mutex_: functions
};

}  // namespace pagoda::torch

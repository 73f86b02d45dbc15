// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
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
  /// The backward of a custom function in the pass is over: gradients that waited for it may be
  /// complete. `pages`: what its forward had used; null: anything. Must not throw.
  virtual void function_ended(const CustomFunctions::Pages* pages) noexcept = 0;
  /// The pass is over. What it throws is thrown by the pass.
  virtual void pass_ended() = 0;
  /// The pass ended with an error. Any thread, later than the error perhaps.
  virtual void pass_failed() noexcept = 0;
};

/// What can still add to a parameter's gradient in the passes under way.
enum class Outstanding : std::uint8_t {
  Nothing,          ///< the gradient is complete
  RunningFunction,  ///< only another pass of a custom function that is running on this thread
  More,             ///< an accumulation in another pass, or a custom function that has not run
};

/// The backward passes under way in the process, as autograd runs them: which are inside which, and
/// what is still to come in each. See docs/notes/passes.md.
///
/// One for the process. It sees the beginning and the end of every node of a graph by
/// at::RecordFunction while it is installed. Any thread.
class Passes {
 public:
  static Passes& instance();
  /// Both count; called when no pass runs.
  void install();
  void remove();

  /// The pass that this thread runs, or the outermost of those around it. Listens to that one:
  /// `listener` is told of it, and of every custom function that ends in it or inside it.
  int listen(const std::weak_ptr<PassListener>& listener);
  /// The parameter's gradient has been accumulated in the pass that this thread runs: what is left?
  Outstanding accumulated(const at::Tensor& parameter, const pager::Page& page);
  Outstanding outstanding(const at::Tensor& parameter, const pager::Page& page) const;
  /// Which custom function's backward is running on this thread: a number of its own for each time
  /// that one runs; 0: none.
  static std::uint64_t running_function() noexcept;

 private:
  using Node = ::torch::autograd::Node;
  using Lock = RankedLock<LockRank::Passes>;
  /// What of a node matters here.
  enum class Kind : std::uint8_t { Plain, Accumulation, Python, Cpp };
  struct Pass;
  struct Ending;
  struct Running;
  struct Callbacks;

  std::unique_ptr<at::ObserverContext> node_begins();
  void node_ends(const Running& running) noexcept;
  void pass_ends(int number);
  void pass_fails(int number) noexcept;
  Pass* find_or_begin(int number, const Lock& lock);
  Kind kind_of(const Node& node, const Lock& lock);
  void add_function(Pass& pass, const Node& node, Kind kind, const Lock& lock);
  Outstanding outstanding(const Node* accumulation, const pager::Page& page,
                          const Lock& lock) const;
  std::vector<std::shared_ptr<PassListener>> listeners_around(int pass, const Lock& lock) const;

  mutable RankedMutex<LockRank::Passes> mutex_;
  std::unordered_map<int, std::unique_ptr<Pass>> passes_;      // guarded by mutex_
  std::unordered_map<std::type_index, Kind> kinds_;            // guarded by mutex_
  std::unordered_map<std::type_index, bool> cpp_runs_passes_;  // guarded by mutex_; of those seen
  std::size_t installed_ = 0;                                  // guarded by mutex_
  std::uint64_t handle_ = 0;                                   // guarded by mutex_
};

}  // namespace pagoda::torch

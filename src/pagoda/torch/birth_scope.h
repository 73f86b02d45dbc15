// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace at {
class Tensor;
}

namespace pagoda::torch {

/// While it lives, tensors made on this thread that become parameters (leaves that require a
/// gradient) are handed to `adopt` before the next operator runs: a model larger than memory is
/// built one page at a time. Scopes nest; each belongs to the thread that made it.
class BirthScope {
 public:
  using Adopt = std::function<void(const at::Tensor&)>;

  explicit BirthScope(Adopt adopt);
  BirthScope(const BirthScope&) = delete;
  BirthScope& operator=(const BirthScope&) = delete;
  /// Hands over what has become a parameter since the last operator.
  ~BirthScope();

  /// Throws what adopting threw inside an operator's announcement, where nothing may be thrown.
  void check();

  /// The observer tells that an operator is about to run on this thread.
  static void operator_starts() noexcept;

 private:
  struct State;
  State* state_;
};

}  // namespace pagoda::torch

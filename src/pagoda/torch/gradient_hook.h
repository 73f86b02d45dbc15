// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>

#include <ATen/core/Tensor.h>

namespace pagoda::torch {

/// What is called in a backward pass that reaches a parameter, on the thread that runs it.
struct GradientCalls {
  /// A gradient is about to be added to p.grad.
  std::function<void()> comes;
  /// It has been, and hooks of the user's that were there before ours have been called.
  std::function<void(const at::Tensor& parameter)> accumulated;
};

/// Returns what hook_of() gives as long as ours is in place. Whoever replaces it ends both calls.
void* set_gradient_hook(const at::Tensor& parameter, GradientCalls calls);
/// Makes sure that `comes` is called: the first p.register_hook() in Python takes it away.
void keep_gradient_hook(const at::Tensor& parameter);
/// The hook that is in place now; null for none.
void* hook_of(const at::Tensor& parameter);
/// Takes ours away again and puts back what it was chained to.
void remove_gradient_hook(const at::Tensor& parameter);
/// The graph of an earlier forward must not be used after the parameter has been updated.
void bump_version(const at::Tensor& parameter);
/// Runs the backward pass from `loss`; `pass` gets its number before the first operator of it runs.
void run_backward(const at::Tensor& loss, std::atomic<int>& pass, bool retain_graph);

}  // namespace pagoda::torch

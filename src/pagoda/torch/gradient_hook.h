// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>

#include <ATen/core/Tensor.h>

namespace pagoda::torch {

/// Calls `taken` with the parameter each time its gradient has been accumulated, after a hook that
/// was there before. Returns what hook_of() gives as long as ours is in place.
void* set_gradient_hook(const at::Tensor& parameter, std::function<void(const at::Tensor&)> taken);
/// The hook that is in place now; null for none.
void* hook_of(const at::Tensor& parameter);
/// Takes ours away again and puts back what it was chained to.
void remove_gradient_hook(const at::Tensor& parameter);
/// The graph of an earlier forward must not be used after the parameter has been updated.
void bump_version(const at::Tensor& parameter);
/// Calls `then` when the backward pass that runs on this thread is over; not if it fails.
void at_end_of_pass(std::function<void()> then);
/// Runs the backward pass from `loss`; `pass` gets its number before the first operator of it runs.
void run_backward(const at::Tensor& loss, std::atomic<int>& pass);

}  // namespace pagoda::torch

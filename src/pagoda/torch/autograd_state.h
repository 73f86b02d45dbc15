// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace pagoda::torch {

/// Whether this thread is running a backward pass. Own file, for autograd's headers are slow to
/// compile.
bool in_backward() noexcept;
/// Which pass this thread is running; one inside another (a checkpoint that recomputes) has a
/// number of its own. kNoPass outside of any.
inline constexpr int kNoPass = -1;
int current_pass() noexcept;

}  // namespace pagoda::torch

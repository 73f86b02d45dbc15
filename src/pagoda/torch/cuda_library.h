// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace pagoda::torch {

/// Makes sure that torch's CUDA operators are there: a C++ program links the CPU part of torch
/// only, so that it also runs where there is no CUDA. Loads the rest from beside it, once.
/// UserError that says what is missing. Any thread.
void load_cuda();

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace pagoda::torch {

/// The dense tensors that a sparse one is made of, its indices and its values; nothing of any other
/// tensor. A sparse tensor has no storage of its own, and its values may be a parameter's.
c10::SmallVector<at::Tensor, 3> sparse_parts(const at::Tensor& tensor);

}  // namespace pagoda::torch

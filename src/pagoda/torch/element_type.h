// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "pagoda/kernels/element.h"

namespace pagoda::torch {

/// How the kernels call the tensor's type; nothing for one that they do not know.
inline std::optional<kernels::Dtype> element_type(const at::Tensor& tensor) noexcept {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::Dtype::F32;
    case at::kBFloat16:
      return kernels::Dtype::BF16;
    case at::kHalf:
      return kernels::Dtype::F16;
    default:
      return std::nullopt;
  }
}

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pagoda/kernels/element.h"

namespace pagoda::torch {

/// Throws UserError for a tensor whose storage cannot be a page of an engine on `device`: one
/// without bytes, with bytes that only a subclass knows, or on yet another device.
void require_pageable(const at::Tensor& tensor, const std::string& name, c10::Device device);
/// The same for all parameters of a model, before the first of them becomes a page: on the meta
/// device it is usually all of them, and they are counted.
void require_pageable(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                      c10::Device device);
/// The type that a parameter is trained in. UserError for one that the updates do not know, and for
/// tensors that autograd or an update cannot write to.
kernels::Dtype require_trainable(const at::Tensor& tensor, const std::string& name);

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "torch/plain_loop.h"

namespace zoo {

/// The loop that everybody writes, with torch::optim::AdamW, for one rank and fp32: what tells
/// whether plain_loop() itself is right. The optimizer of `training` is an AdamConfig with
/// decoupled decay; clipping is torch::nn::utils::clip_grad_norm_.
Trained torch_loop(const Options& options, const Training& training);

/// ‖a − b‖ ÷ ‖b‖ over all elements of all parameters, read as fp32.
double relative_distance(const std::vector<Bits>& a, const std::vector<Bits>& b);

}  // namespace zoo

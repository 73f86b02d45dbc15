// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include <c10/core/Device.h>

#include "pagoda/base/bytes.h"

namespace pagoda::torch {

/// Torch takes at most `limit` of the `total` bytes of a GPU, activations and workspaces included,
/// until the returned handle goes; it says "out of memory" beyond. load_cuda() came before.
[[nodiscard]] std::shared_ptr<void> limit_cuda_memory(c10::Device device, Bytes limit, Bytes total);

}  // namespace pagoda::torch

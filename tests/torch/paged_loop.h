// SPDX-License-Identifier: Apache-2.0
// The same training as plain_loop.h, through the engine. Includes no torch.
#pragma once

#include <functional>
#include <memory>

#include "pagoda/comm/world.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/stats.h"
#include "torch/plain_loop.h"

namespace zoo {

struct PagedTrained : Trained {
  pagoda::engine::Stats stats;  ///< of rank 0, after the last step
};

/// How the engine's user writes a micro-batch.
enum class Backward : std::uint8_t { Engine, Plain };

/// Trains through an engine per rank. Ranks are threads; `worlds` has a world for each, in order.
/// The result has every rank's losses and rank 0's parameters; all ranks' are equal, or this
/// throws.
PagedTrained paged_loop(const Options& options, const Training& training,
                        const pagoda::Config& config,
                        const std::vector<std::shared_ptr<pagoda::comm::World>>& worlds,
                        Backward backward = Backward::Engine);
/// With ranks as threads that talk through memory.
PagedTrained paged_loop(const Options& options, const Training& training,
                        const pagoda::Config& config, Backward backward = Backward::Engine);

/// Makes the "cuda" device of Options known to torch; repeatable results from then on.
void use_cuda();

/// Bytes of all parameters of a new model, and of the largest one's storage.
struct ModelBytes {
  pagoda::Bytes all = 0;
  pagoda::Bytes largest = 0;
};
ModelBytes model_bytes(const Options& options);

}  // namespace zoo

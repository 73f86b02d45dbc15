// SPDX-License-Identifier: Apache-2.0
// Small torch programs for `pagoda bench pager`. Includes no torch.
#pragma once

#include <cstddef>
#include <vector>

#include "pagoda/engine/config.h"
#include "pagoda/engine/stats.h"

namespace pagoda::torch::bench {

/// Nanoseconds of computing that the observer adds to one tiny operator. Each is the median over
/// rounds in which operators with and without it take turns.
struct ObserverCost {
  double untouched = 0;       ///< no input is a page
  double touching = 0;        ///< one input is a page, and resident
  double operator_alone = 0;  ///< the operator without the observer
};

/// With `pages` small parameters in the page table, all of them resident.
ObserverCost observer_cost(std::size_t pages, std::size_t rounds);

/// What an engine had done after each step of a small GPT.
std::vector<engine::Stats> train_gpt_like(const Config& config, std::size_t layers,
                                          std::size_t width, std::size_t steps);

}  // namespace pagoda::torch::bench

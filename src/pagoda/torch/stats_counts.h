// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Dict.h>

#include "pagoda/engine/stats.h"

namespace pagoda::torch {

/// Figures by names with dots, which Python makes a tree of: "pages.faults". Times are nanoseconds.
using Counts = c10::Dict<std::string, std::int64_t>;

/// What engine.stats() of the Python package makes its dict of.
Counts counts_of(const engine::Stats& stats);

}  // namespace pagoda::torch

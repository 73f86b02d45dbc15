// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "pagoda/base/thread_pool.h"
#include "pagoda/kernels/element.h"
#include "pagoda/kernels/isa.h"

namespace pagoda::kernels {

/// Converts `count` elements, rounding to nearest even; between equal types it copies. Infinities
/// stay, what is too large becomes one, a NaN stays a NaN with its sign and upper payload
/// ("Casts" in docs/notes/numerics.md). bf16 ↔ fp16 goes through fp32. Arrays do not overlap. Any
/// thread.
void cast(ConstElements from, Elements to, std::size_t count, Isa isa = active_isa());

/// The same on this thread and the pool's.
void cast(ConstElements from, Elements to, std::size_t count, ThreadPool& pool,
          Priority priority = Priority::Normal, Isa isa = active_isa());

}  // namespace pagoda::kernels

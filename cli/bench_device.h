// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench_report.h"
#include "pagoda/base/bytes.h"

namespace pagoda::cli {

/// Nanoseconds of a malloc and a free: what an arena's allocation is held against.
double allocation_ns();

/// Copies and pinned memory on the GPU beside the bare runtime; a note where there is none.
void bench_cuda(BenchReport& report, Bytes copy_bytes, Bytes pinned_bytes);

}  // namespace pagoda::cli

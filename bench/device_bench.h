// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench_report.h"
#include "pagoda/base/bytes.h"

namespace pagoda::bench {

/// Copies and pinned memory on the GPU beside the bare runtime; a note where there is none.
void bench_cuda(cli::BenchReport& report, Bytes copy_bytes, Bytes pinned_bytes);

}  // namespace pagoda::bench

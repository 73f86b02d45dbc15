// SPDX-License-Identifier: Apache-2.0
#include "bench_device.h"

namespace pagoda::cli {

void bench_cuda(BenchReport& report, Bytes, Bytes) {
  report.note("CUDA: this build was made without the CUDA runtime's headers");
}

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/plan/buffer_size.h"

namespace pagoda::plan {

Bytes buffer_size(Bytes budget, Bytes count, BufferRange range) noexcept {
  Bytes size = range.most;
  while (size > range.least && size * count > budget / kBufferShare) size /= 2;
  return size;
}

}  // namespace pagoda::plan

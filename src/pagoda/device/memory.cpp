// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/memory.h"

#include "pagoda/device/ordering_checker.h"

namespace pagoda::device {

const char* name(MemoryKind kind) {
  return kind == MemoryKind::Device ? "device" : "pinned";
}

Memory::~Memory() {
  // Forgotten before the bytes are freed: the next allocation may lie at the same address.
  if (checker_) checker_->removed_memory(data_);
}

}  // namespace pagoda::device

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/apart.h"

#include <mutex>

#include <malloc.h>

namespace pagoda::torch {
namespace {

std::mutex apart_mutex;
int alive = 0;  // guarded by apart_mutex

}  // namespace

LargeBlocksApart::LargeBlocksApart() {
  const std::lock_guard lock(apart_mutex);
  if (alive++ == 0) ::mallopt(M_MMAP_THRESHOLD, 256 << 10);
}

LargeBlocksApart::~LargeBlocksApart() {
  const std::lock_guard lock(apart_mutex);
  if (--alive > 0) return;
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 64 << 20);
}

}  // namespace pagoda::torch

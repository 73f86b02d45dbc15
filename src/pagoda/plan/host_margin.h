// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "pagoda/base/bytes.h"

namespace pagoda::plan {

/// Host memory that is left to the system, and to what a process has beside its budgets, of so much
/// that is available: a sixteenth, from 64 MiB to 4 GiB, or all of it.
constexpr Bytes host_margin(Bytes available) noexcept {
  return std::min(available, std::clamp<Bytes>(available / 16, 64_MiB, 4_GiB));
}

}  // namespace pagoda::plan

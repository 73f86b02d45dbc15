// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "pagoda/base/memory_limit.h"

namespace pagoda {

/// The limit on memory of this process's control group, or one above it, that leaves least, as it
/// is now: memory.max and memory.high, or memory.limit_in_bytes of version 1. Nothing where none is
/// set. What the page cache could give back counts as left. May be called from any thread.
std::optional<MemoryLimit> cgroup_memory_limit();

/// The same where control groups are mounted at `mounts` and /proc/self/cgroup says `own`.
std::optional<MemoryLimit> cgroup_memory_limit(const std::filesystem::path& mounts,
                                               std::string_view own);

}  // namespace pagoda

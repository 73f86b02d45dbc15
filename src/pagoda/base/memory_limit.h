// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "pagoda/base/bytes.h"

namespace pagoda {

/// A limit on the memory of this process, as setrlimit(2) and `ulimit` set it. The machine may have
/// more. A plain value.
struct MemoryLimit {
  std::string name;  ///< "RLIMIT_AS (ulimit -v)"
  Bytes allowed = 0;
  Bytes used = 0;

  Bytes left() const noexcept { return allowed > used ? allowed - used : 0; }
  /// "RLIMIT_AS (ulimit -v) allows this process 4 GiB, of which 3 GiB are in use".
  std::string describe() const;
};

/// The limit that leaves least, as it is now; nothing where none is set. May be called from any
/// thread.
std::optional<MemoryLimit> tightest_memory_limit();

/// Why the process was not given `bytes` more: the limit that refuses them, or that the machine has
/// none left.
std::string refused_memory(Bytes bytes);

}  // namespace pagoda

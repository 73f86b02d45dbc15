// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "pagoda/base/bytes.h"

namespace pagoda {

/// A limit on the memory of this process, or of all processes of its control group. The machine may
/// have more. A plain value.
struct MemoryLimit {
  std::string name;  ///< "RLIMIT_AS (ulimit -v)"
  Bytes allowed = 0;
  Bytes used = 0;

  Bytes left() const noexcept { return allowed > used ? allowed - used : 0; }
  /// "RLIMIT_AS (ulimit -v) allows this process 4 GiB, of which 3 GiB are in use".
  std::string describe() const;
};

/// The limit of setrlimit(2) and `ulimit` that leaves least, as it is now; nothing where none is
/// set. May be called from any thread.
std::optional<MemoryLimit> tightest_memory_limit();

/// What processes could have now without swapping: the machine's, or what is left of this process's
/// control group. Any thread.
Bytes available_to_all();
/// The same for this process, which may have limits of its own.
Bytes available_memory();

/// Why the process was not given `bytes` more: the limit that refuses them, or that the machine has
/// none left.
std::string refused_memory(Bytes bytes);

}  // namespace pagoda

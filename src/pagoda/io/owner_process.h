// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include <unistd.h>

#include "pagoda/base/error.h"

namespace pagoda::io {

/// Remembers which process made an object with threads, rings or locks.
///
/// A forked child (a DataLoader's worker) inherits the object but not its threads, and its mutexes
/// as they stood. There the object may only be forgotten: using it throws, and its owner leaks it
/// instead of destroying it. Any thread may ask.
class OwnerProcess {
 public:
  bool here() const noexcept { return ::getpid() == pid_; }

  /// Throws EngineError in any other process.
  void require(std::string_view what) const {
    if (!here()) [[unlikely]] {
      throw EngineError(fmt::format("{} was used in a forked process; it belongs to the process "
                                    "that made it",
                                    what),
                        {context("owner", pid_), context("here", ::getpid())});
    }
  }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace pagoda::io

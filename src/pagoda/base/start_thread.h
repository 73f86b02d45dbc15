// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace pagoda {

/// Throws EngineError: a thread could not be started for this reason, with the limits that may be
/// the cause.
[[noreturn]] void refuse_thread(const std::error_code& cause);

/// A thread that runs `work`; EngineError, with what to do, where the system does not allow one
/// more. `Thread` is std::thread or std::jthread. Every thread of ours is started by it.
template <class Thread = std::thread, class Work>
[[nodiscard]] Thread start_thread(Work&& work) {
  try {
    return Thread(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    refuse_thread(error.code());
  }
}

}  // namespace pagoda

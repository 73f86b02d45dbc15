// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>

namespace pagoda {

/// In a handler, on a thread that others wait for: keeps the error that is handled in `first`,
/// unless that has one. `lock`, held or not, guards `first`, and is held afterwards.
///
/// `on_failure`, where there is one, hears of it before, without the lock: what those who wait do
/// next must find the engine failed.
template <class Lock>
void keep_first_error(std::exception_ptr& first,
                      const std::function<void(std::exception_ptr)>& on_failure, Lock& lock) {
  if (!lock.owns_lock()) lock.lock();
  if (first == nullptr && on_failure) {
    lock.unlock();
    on_failure(std::current_exception());
    lock.lock();
  }
  if (first == nullptr) first = std::current_exception();
}

}  // namespace pagoda

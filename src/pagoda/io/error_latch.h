// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>

#include "pagoda/base/ranked_mutex.h"

namespace pagoda::io {

/// Keeps an error that nobody waited for until it can be thrown. All members may be called from any
/// thread.
class ErrorLatch {
 public:
  ErrorLatch() = default;
  ErrorLatch(const ErrorLatch&) = delete;
  ErrorLatch& operator=(const ErrorLatch&) = delete;
  /// Logs an error that was never thrown.
  ~ErrorLatch();

  /// Keeps `error`, or logs it when an earlier one is still kept.
  void set(std::exception_ptr error) noexcept;
  /// Throws the error kept, once.
  void raise();

 private:
  RankedMutex<LockRank::ErrorLatch> mutex_;
  std::exception_ptr error_;  // guarded by mutex_
};

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace pagoda::torch {

/// While one lives torch's own warnings and errors are not logged, in the whole process: c10d logs
/// a stack trace for each call on a store that is gone, which is an exception, too. Nothing is held
/// back where TORCH_CPP_LOG_LEVEL asks for more than warnings. Any thread, but not one that may be
/// left behind in a call: whoever waits for the call has it.
class QuietTorchLog {
 public:
  QuietTorchLog();
  QuietTorchLog(const QuietTorchLog&) = delete;
  QuietTorchLog& operator=(const QuietTorchLog&) = delete;
  ~QuietTorchLog();

  /// A thread is left behind in a call, which may fail any time and has been reported: the log
  /// stays quiet for so long, whenever this goes, and not for as long as the call lasts.
  void linger(std::chrono::milliseconds time = std::chrono::minutes(1)) noexcept;

 private:
  bool lingers_ = false;
};

}  // namespace pagoda::torch

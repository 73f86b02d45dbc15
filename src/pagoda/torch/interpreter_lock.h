// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace pagoda::torch {

/// While one lives, the calling thread does not hold Python's interpreter lock; it takes it again
/// when this goes, if it held it. For whoever waits where Python code may be what is waited for. In
/// a process without Python it does nothing.
///
/// Python is found in the process at run time: the library is built against no version of it.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock();
  WithoutInterpreterLock(const WithoutInterpreterLock&) = delete;
  WithoutInterpreterLock& operator=(const WithoutInterpreterLock&) = delete;
  ~WithoutInterpreterLock();

 private:
  void* state_ = nullptr;  // Python's, of this thread; null: it did not hold the lock
};

}  // namespace pagoda::torch

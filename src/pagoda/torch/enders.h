// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/io/owner_process.h"

namespace pagoda::torch {

/// Ends engines on threads of their own. Python's lock is held where a graph or a pin is dropped,
/// and an engine's end waits for threads that may need it. Any thread.
class Enders {
 public:
  /// Of this process. A forked child has one of its own, for engines of its own.
  static Enders& instance();

  /// Owned by whoever has the pointer: the last one to let go of it ends it, on a thread of its own
  /// or, inside of EndsHere, at once. In a forked process it is leaked.
  template <class T>
  std::shared_ptr<T> share(std::unique_ptr<T> owned) {
    return {owned.release(), [this](T* last) {
              if (owner_.here()) end([last] { delete last; });
            }};
  }

  /// Nothing ends from now on. Waits for what does. In a forked process, which has none of the
  /// threads, it returns at once.
  void stop();

  /// What this thread lets go of meanwhile ends before it goes on: it holds no lock that an ending
  /// could wait for.
  class EndsHere {
   public:
    EndsHere();
    EndsHere(const EndsHere&) = delete;
    EndsHere& operator=(const EndsHere&) = delete;
    ~EndsHere();
  };

 private:
  void end(std::function<void()> ending) noexcept;

  const io::OwnerProcess owner_;  // a forked child must not even take the lock
  RankedMutex<LockRank::Enders> mutex_;
  Condition changed_;
  int running_ = 0;       // guarded by mutex_
  bool stopped_ = false;  // guarded by mutex_
};

}  // namespace pagoda::torch

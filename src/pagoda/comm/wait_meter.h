// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include "pagoda/base/clock.h"

namespace pagoda::comm {

/// For how long threads of this rank have been waiting for other ranks. Waits that overlap count as
/// one. All members may be called from any thread; what they say is at most a moment old.
class WaitMeter {
 public:
  /// While it lives, its thread waits.
  class Waiting {
   public:
    explicit Waiting(WaitMeter& meter) noexcept : meter_(meter) {
      if (meter.waiting_.fetch_add(1) == 0) meter.since_.store(now_ns());
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() { meter_.waiting_.fetch_sub(1); }

   private:
    WaitMeter& meter_;
  };

  /// 0: nobody waits.
  Nanos waited() const noexcept { return waiting_.load() == 0 ? 0 : now_ns() - since_.load(); }

 private:
  std::atomic<int> waiting_{0};
  std::atomic<Nanos> since_{0};  // when the first of those came
};

}  // namespace pagoda::comm

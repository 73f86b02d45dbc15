// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/torch/quiet_torch_log.h"

namespace pagoda::torch {

/// What `call` returns or throws. It may block for longer than anybody wants to wait, so it runs on
/// a thread of its own, and `look` is called periodically meanwhile. Where `look` throws, so does
/// this: after `end` has ended the call, or, without one, at once. Then the thread is left behind,
/// and the call has its own share of all that it uses. Torch logs nothing meanwhile.
template <class Result>
Result attempt(std::function<Result()> call, const std::function<void()>& look,
               const std::function<void(const std::exception&)>& end = {}) {
  using std::chrono::milliseconds;
  constexpr milliseconds kLook{50};
  require_may_wait();
  QuietTorchLog of_what_we_report;
  std::packaged_task<Result()> task(std::move(call));
  std::future<Result> result = task.get_future();
  std::thread thread = start_thread([task = std::move(task)]() mutable { task(); });
  try {
    milliseconds pause{1};
    while (result.wait_for(pause) != std::future_status::ready) {
      look();
      pause = std::min(kLook, 2 * pause);
    }
  } catch (const std::exception& error) {
    if (end) {
      end(error);
      thread.join();
    } else {
      thread.detach();
      of_what_we_report.linger();
    }
    throw;
  }
  thread.join();
  return result.get();
}

}  // namespace pagoda::torch

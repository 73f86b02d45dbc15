// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/quiet_torch_log.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include <c10/util/Logging.h>
#include <pthread.h>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"

namespace pagoda::torch {
namespace {

constexpr int kWarning = 1;
constexpr int kFatal = 3;

std::atomic_ref<int> level() {  // torch reads it anywhere
  return std::atomic_ref<int>(FLAGS_caffe2_log_level);
}

/// Never destroyed: a thread that was left behind may end after all else.
struct Quiet {
  RankedMutex<LockRank::QuietTorchLog> mutex;
  int wanted = 0;  // guarded by mutex
  int before = 0;  // guarded by mutex: torch's level

  static Quiet& instance() { return *of_process(); }

 private:
  /// A forked child has none of the threads that want quiet, and one of them may have had the lock.
  static Quiet*& of_process() {
    static Quiet* quiet = new Quiet;
    static const bool watches_fork = ::pthread_atfork(nullptr, nullptr, [] {
                                       const Quiet& parents = *of_process();
                                       if (parents.wanted > 0) level().store(parents.before);
                                       of_process() = new Quiet;
                                     }) == 0;
    (void)watches_fork;
    return quiet;
  }
};

void give_up() noexcept {
  Quiet& quiet = Quiet::instance();
  const std::lock_guard lock(quiet.mutex);
  if (--quiet.wanted == 0) level().store(quiet.before);
}

}  // namespace

QuietTorchLog::QuietTorchLog() {
  Quiet& quiet = Quiet::instance();
  const std::lock_guard lock(quiet.mutex);
  if (quiet.wanted++ > 0) return;
  quiet.before = level().load();
  if (quiet.before >= kWarning) level().store(kFatal);
}

QuietTorchLog::~QuietTorchLog() {
  if (!lingers_) give_up();
}

void QuietTorchLog::linger(std::chrono::milliseconds time) noexcept {
  try {
    start_thread([time] {
      std::this_thread::sleep_for(time);
      give_up();
    }).detach();
    lingers_ = true;
  } catch (const std::exception&) {  // no thread can be started: the log is quiet no longer
  }
}

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "pagoda/base/ranked_mutex.h"

namespace pagoda::device::emulated {

/// A thread that runs a stream's work in order, and the failure that stops it.
///
/// Any thread may push, wait and query. The destructor runs what is queued first; it may be called
/// by the thread itself (a function that held the last reference to its stream).
class WorkQueue {
 public:
  /// Work is told the stream's failure so far, and may set it.
  using Work = std::function<void(std::exception_ptr& failure)>;

  explicit WorkQueue(std::string name);
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;
  ~WorkQueue();

  void push(Work work);
  bool idle() const;
  /// Until all that was pushed so far has run.
  void drain();
  /// The failure, once; null if there is none.
  std::exception_ptr take_failure();

 private:
  /// Shared with the thread, which may outlive the queue by its last instructions.
  struct State {
    explicit State(std::string stream) : name(std::move(stream)) {}
    const std::string name;
    mutable RankedMutex<LockRank::WorkQueue> mutex;
    Condition changed;
    std::deque<Work> waiting;  // guarded by mutex, as is all below
    std::size_t pushed = 0;
    std::size_t finished = 0;
    bool stopping = false;
    std::exception_ptr failure;
  };
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace pagoda::device::emulated

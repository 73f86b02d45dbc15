// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "pagoda/base/ranked_mutex.h"

namespace pagoda {

/// What a task waits behind. A waiting task of a higher priority always starts before one of a
/// lower; a running task is never interrupted, so keep background tasks short.
enum class Priority : std::uint8_t { Urgent, Normal, Background };

/// A fixed number of threads that run tasks in order of priority, first in first out within one.
///
/// Any thread may submit and run parallel_for, the pool's own included. A task may not block on
/// the future of another task of its pool (all threads could be waiting); parallel_for may be
/// nested, for whoever calls it works along.
class ThreadPool {
 public:
  /// What stop() does with tasks that have not started.
  enum class Stop {
    Drain,   ///< run them first
    Cancel,  ///< drop them; their futures throw EngineError
  };

  /// `name` shows in debuggers and traces as "name/0", "name/1", …
  ThreadPool(std::size_t threads, std::string name);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  /// stop(Stop::Cancel).
  ~ThreadPool();

  std::size_t size() const noexcept { return thread_count_; }
  const std::string& name() const noexcept { return name_; }

  /// Queues `fn`; its result or exception arrives at the future. Throws EngineError after stop().
  template <class Fn>
  auto submit(Fn&& fn, Priority priority = Priority::Normal)
      -> std::future<std::invoke_result_t<std::decay_t<Fn>&>>;

  /// Runs fn(begin, end) over consecutive pieces of [begin, end) of at most `grain` elements, on
  /// this thread and the pool's, and returns when all are done. Pieces start at begin + k·grain, so
  /// where the cuts fall does not depend on the number of threads. If pieces throw, those not
  /// started are skipped and the exception of the lowest piece that ran is rethrown.
  void parallel_for(std::size_t begin, std::size_t end, std::size_t grain,
                    const std::function<void(std::size_t, std::size_t)>& fn,
                    Priority priority = Priority::Normal);

  /// Lets running tasks finish, ends the threads. Later calls do nothing.
  void stop(Stop how);

 private:
  /// A queued call. Dropping it without running it tells the waiter why.
  struct Task {
    std::function<void()> run;
    std::function<void()> cancel;
  };

  void enqueue(Task task, Priority priority);
  void work(std::size_t index);

  const std::string name_;
  const std::size_t thread_count_;
  RankedMutex<LockRank::ThreadPool> mutex_;
  Condition wake_;
  std::array<std::deque<Task>, 3> queues_;  // guarded by mutex_, one per priority
  bool stopping_ = false;                   // guarded by mutex_
  std::vector<std::jthread> threads_;       // written by the constructor and the first stop()
};

template <class Fn>
auto ThreadPool::submit(Fn&& fn, Priority priority)
    -> std::future<std::invoke_result_t<std::decay_t<Fn>&>> {
  using Result = std::invoke_result_t<std::decay_t<Fn>&>;
  struct Call {
    std::decay_t<Fn> fn;
    std::promise<Result> promise;
  };
  auto call = std::make_shared<Call>(Call{std::forward<Fn>(fn), {}});
  std::future<Result> future = call->promise.get_future();
  Task task;
  task.run = [call] {
    try {
      if constexpr (std::is_void_v<Result>) {
        call->fn();
        call->promise.set_value();
      } else {
        call->promise.set_value(call->fn());
      }
    } catch (...) {
      call->promise.set_exception(std::current_exception());
    }
  };
  task.cancel = [call] { call->promise.set_exception(std::current_exception()); };
  enqueue(std::move(task), priority);
  return future;
}

}  // namespace pagoda

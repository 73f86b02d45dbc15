// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>

#include <pthread.h>

#include "pagoda/base/error.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"

namespace pagoda {
namespace {

/// What the threads of one parallel_for share. Helpers hold it by shared_ptr, so one that starts
/// after the loop is over finds no piece left and goes.
struct Loop {
  std::size_t begin;
  std::size_t end;
  std::size_t grain;
  std::size_t pieces;
  const std::function<void(std::size_t, std::size_t)>* fn;  // valid while a piece is unfinished

  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};

  RankedMutex<LockRank::Loop> mutex;
  Condition idle;
  std::size_t finished = 0;                                            // guarded by mutex
  std::size_t failed_piece = std::numeric_limits<std::size_t>::max();  // guarded by mutex
  std::exception_ptr error;                                            // guarded by mutex

  void run() {
    std::size_t done = 0;
    for (;;) {
      const std::size_t piece = next.fetch_add(1);
      if (piece >= pieces) break;
      if (!failed.load(std::memory_order_relaxed)) run_piece(piece);
      ++done;
    }
    if (done == 0) return;
    const std::lock_guard lock(mutex);
    finished += done;
    if (finished == pieces) idle.notify_all();
  }

  void run_piece(std::size_t piece) {
    const std::size_t from = begin + piece * grain;
    const std::size_t to = end - from < grain ? end : from + grain;
    try {
      (*fn)(from, to);
    } catch (...) {
      failed.store(true, std::memory_order_relaxed);
      const std::lock_guard lock(mutex);
      if (piece < failed_piece) {
        failed_piece = piece;
        error = std::current_exception();
      }
    }
  }

  void wait() {
    std::unique_lock lock(mutex);
    idle.wait(lock, [this] { return finished == pieces; });
  }
};

}  // namespace

ThreadPool::ThreadPool(std::size_t threads, std::string name)
    : name_(std::move(name)), thread_count_(threads) {
  PAGODA_REQUIRE_GE(threads, 1U, "a thread pool needs a thread");
  threads_.reserve(threads);
  try {
    for (std::size_t i = 0; i < threads; ++i) {
      threads_.push_back(start_thread<std::jthread>([this, i] { work(i); }));
    }
  } catch (...) {
    stop(Stop::Cancel);  // the threads that did start must not outlive *this
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop(Stop::Cancel);
}

void ThreadPool::enqueue(Task task, Priority priority) {
  {
    const std::lock_guard lock(mutex_);
    PAGODA_CHECK(!stopping_, "thread pool '{}' was stopped", name_);
    queues_[static_cast<std::size_t>(priority)].push_back(std::move(task));
  }
  wake_.notify_one();
}

void ThreadPool::work(std::size_t index) {
  const std::string thread_name = fmt::format("{}/{}", name_, index);
  ::pthread_setname_np(::pthread_self(), thread_name.substr(0, 15).c_str());
  trace::name_thread(thread_name);
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto queue = std::ranges::find_if(queues_, [](const auto& q) { return !q.empty(); });
    if (queue != queues_.end()) {
      Task task = std::move(queue->front());
      queue->pop_front();
      lock.unlock();
      task.run();
      task = {};  // what the call held goes before the lock is taken
      lock.lock();
    } else if (stopping_) {
      return;
    } else {
      wake_.wait(lock);
    }
  }
}

void ThreadPool::parallel_for(std::size_t begin, std::size_t end, std::size_t grain,
                              const std::function<void(std::size_t, std::size_t)>& fn,
                              Priority priority) {
  PAGODA_REQUIRE_GE(grain, 1U, "parallel_for needs a grain");
  if (begin >= end) return;
  const std::size_t pieces = (end - begin - 1) / grain + 1;
  if (pieces == 1) {
    fn(begin, end);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->begin = begin;
  loop->end = end;
  loop->grain = grain;
  loop->pieces = pieces;
  loop->fn = &fn;
  const std::size_t helpers = std::min(size(), pieces - 1);
  {
    const std::lock_guard lock(mutex_);
    PAGODA_CHECK(!stopping_, "thread pool '{}' was stopped", name_);
    auto& queue = queues_[static_cast<std::size_t>(priority)];
    for (std::size_t i = 0; i < helpers; ++i) queue.push_back({[loop] { loop->run(); }, [] {}});
  }
  wake_.notify_all();
  loop->run();
  loop->wait();
  // Moved out, so that the exception goes with its catcher and not with a helper that is still
  // letting go of the loop.
  if (const std::exception_ptr error = std::move(loop->error)) std::rethrow_exception(error);
}

void ThreadPool::stop(Stop how) {
  std::array<std::deque<Task>, 3> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ && threads_.empty()) return;
    stopping_ = true;
    if (how == Stop::Cancel) dropped.swap(queues_);
  }
  wake_.notify_all();
  for (auto& queue : dropped) {
    for (Task& task : queue) {
      try {
        throw EngineError(fmt::format("thread pool '{}' was stopped before this task ran", name_));
      } catch (...) {
        task.cancel();  // hands the current exception to the waiter
      }
    }
  }
  threads_.clear();  // joins
}

}  // namespace pagoda

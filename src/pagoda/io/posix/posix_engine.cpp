// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/posix/posix_engine.h"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <thread>

#include <unistd.h>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"
#include "pagoda/io/request_queue.h"

namespace pagoda::io {
namespace {

class PosixEngine final : public Engine {
 public:
  explicit PosixEngine(const Options& options) : files_(options.files) {
    const unsigned count = std::min(options.depth, kMaxPosixThreads);
    threads_.reserve(count);
    try {
      for (unsigned i = 0; i < count; ++i) threads_.push_back(start_thread([this] { work(); }));
    } catch (...) {  // a limit on threads: those that started must end before their queue does
      stop();
      throw;
    }
  }

  ~PosixEngine() override { stop(); }

  std::string_view name() const noexcept override { return "posix"; }

  void submit(RequestList requests) noexcept override {
    // Notified under the lock: once a request is done, another thread may destroy the engine.
    const std::lock_guard lock(mutex_);
    queue_.splice(requests);
    wake_.notify_all();
  }

  bool add_buffer(std::span<std::byte>) override { return false; }
  void remove_buffer(std::span<std::byte>) noexcept override {}

 private:
  void stop() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void work() {
    trace::name_thread("io/posix");
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      Request* request = queue_.pop();
      if (request == nullptr) return;  // stopping, and nothing left
      lock.unlock();
      request->complete(transfer(*request));
      lock.lock();
    }
  }

  std::int64_t transfer(const Request& request) const noexcept {
    if (request.op == Op::Nothing) return 0;
    if (request.file >= files_.size()) return -EBADF;
    const int fd = files_[request.file];
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t moved = request.op == Op::Read
                              ? ::pread(fd, request.data, request.length, offset)
                              : ::pwrite(fd, request.data, request.length, offset);
    return moved >= 0 ? moved : -errno;
  }

  const std::vector<int> files_;
  RankedMutex<LockRank::Posix> mutex_;
  Condition wake_;
  RequestQueue queue_;                // guarded by mutex_
  bool stopping_ = false;             // guarded by mutex_
  std::vector<std::thread> threads_;  // written by the constructor, joined by stop()
};

}  // namespace

std::unique_ptr<Engine> make_posix_engine(const Engine::Options& options) {
  return std::make_unique<PosixEngine>(options);
}

}  // namespace pagoda::io

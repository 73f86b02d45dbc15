// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/uring/uring_engine.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"
#include "pagoda/io/io_error.h"
#include "pagoda/io/request_queue.h"
#include "pagoda/io/uring/buffer_table.h"

namespace pagoda::io {
namespace {

constexpr std::size_t kBatch = 64;  // completions handed out before the ring is looked at again

class UringEngine final : public Engine {
 public:
  /// The errno arrives in `refused` when the ring cannot be had; the object is then only destroyed.
  UringEngine(const Options& options, int& refused)
      : files_(options.files), in_flight_(options.depth, nullptr) {
    wake_fd_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) {
      refused = errno;
      return;
    }
    for (unsigned i = options.depth; i > 0; --i) free_.push_back(i - 1);
    const auto ready = std::make_shared<std::promise<int>>();
    thread_ = start_thread([this, ready] { run(*ready); });
    refused = ready->get_future().get();
  }

  ~UringEngine() override {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        wake(lock);
      }
      thread_.join();
    }
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }

  std::string_view name() const noexcept override { return "uring"; }

  void submit(RequestList requests) noexcept override {
    const std::lock_guard lock(mutex_);
    inbox_.splice(requests);
    wake(lock);
  }

  bool add_buffer(std::span<std::byte> memory) override {
    int error = 0;
    on_ring_thread([&] { error = buffers_->add(memory); });
    if (error != 0) {
      log::warn("io", "memory was not registered with io_uring, transfers will pin it each time",
                {{"bytes", memory.size()}, {"reason", errno_text(error)}});
    }
    return error == 0;
  }

  void remove_buffer(std::span<std::byte> memory) noexcept override {
    on_ring_thread([&] { buffers_->remove(memory); });
  }

 private:
  using Lock = RankedGuard<LockRank::Uring>;
  struct Completion {
    Request* request;
    std::int64_t result;
  };

  /// Rouses the ring's thread if it sleeps; a running one looks at the inbox before it does.
  void wake(const Lock&) noexcept {
    if (!sleeping_) return;
    sleeping_ = false;
    const std::uint64_t one = 1;
    // Cannot block (the counter is far from full) and EINTR is not possible then.
    [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof(one));
  }

  /// The kernel lets only the ring's own thread register memory.
  void on_ring_thread(const std::function<void()>& fn) {
    if (std::this_thread::get_id() == thread_.get_id()) return fn();
    const auto done = std::make_shared<std::promise<void>>();
    {
      const Lock lock(mutex_);
      commands_.push_back([&fn, done] {
        fn();
        done->set_value();
      });
      wake(lock);
    }
    done->get_future().wait();
  }

  // ---- everything below runs on the ring's thread ----

  int open_ring() noexcept {
    const auto entries = static_cast<unsigned>(in_flight_.size()) + 1;  // one to be woken with
    int error = 0;
    for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0U}) {
      ring_ = {};
      error = -io_uring_queue_init(entries, &ring_, flags);
      if (error != EINVAL) break;
    }
    if (error != 0) return error;
    error = -io_uring_register_files(&ring_, files_.data(), static_cast<unsigned>(files_.size()));
    // The ring's memory is no business of a forked child.
    if (error == 0) error = -io_uring_ring_dontfork(&ring_);
    if (error != 0) io_uring_queue_exit(&ring_);
    return error;
  }

  void run(std::promise<int>& ready) {
    trace::name_thread("io/uring");
    const int error = open_ring();
    if (error != 0) return ready.set_value(error);
    buffers_ = std::make_unique<BufferTable>(ring_);
    ready.set_value(0);
    arm_wake();
    while (accept()) {
      if (broken_ != 0) {
        fail_everything();
        continue;
      }
      fill();
      enter(1);
      reap();
      // The disk gets its next requests before this thread hands out what has arrived.
      fill();
      enter(0);
      for (std::size_t i = 0; i < arrived_count_; ++i) {
        arrived_[i].request->complete(arrived_[i].result);
      }
    }
    buffers_.reset();
    io_uring_queue_exit(&ring_);
  }

  /// Takes what others have left. False when it is time to go.
  bool accept() {
    std::vector<std::function<void()>> commands;
    {
      const Lock lock(mutex_);
      while (Request* request = inbox_.pop()) queue_.push(*request);
      commands.swap(commands_);
      const bool idle = queue_.empty() && free_.size() == in_flight_.size();
      if (stopping_ && idle && commands.empty()) return false;
      sleeping_ = commands.empty();
    }
    for (const auto& command : commands) command();
    if (!commands.empty()) return accept();
    return true;
  }

  void arm_wake() noexcept {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    io_uring_prep_read(entry, wake_fd_, &wake_count_, sizeof(wake_count_), 0);
    io_uring_sqe_set_data64(entry, kWake);
  }

  void fill() noexcept {
    while (!free_.empty()) {
      Request* request = queue_.pop();
      if (request == nullptr) return;
      const std::size_t slot = free_.back();
      free_.pop_back();
      in_flight_[slot] = request;
      prepare(*io_uring_get_sqe(&ring_), *request, slot);
    }
  }

  void prepare(io_uring_sqe& entry, const Request& request, std::size_t slot) noexcept {
    if (request.op == Op::Nothing) {
      io_uring_prep_nop(&entry);
      io_uring_sqe_set_data64(&entry, slot);
      return;
    }
    const auto length = static_cast<unsigned>(request.length);
    const int buffer = buffers_->find(request.data, request.length);
    const auto file = static_cast<int>(request.file);
    if (request.op == Op::Read) {
      if (buffer >= 0) {
        io_uring_prep_read_fixed(&entry, file, request.data, length, request.offset, buffer);
      } else {
        io_uring_prep_read(&entry, file, request.data, length, request.offset);
      }
    } else {
      if (buffer >= 0) {
        io_uring_prep_write_fixed(&entry, file, request.data, length, request.offset, buffer);
      } else {
        io_uring_prep_write(&entry, file, request.data, length, request.offset);
      }
    }
    entry.flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(&entry, slot);
  }

  /// Gives the kernel what was prepared and waits for `wait_for` completions.
  void enter(unsigned wait_for) noexcept {
    if (wait_for == 0 && io_uring_sq_ready(&ring_) == 0) return;
    while (true) {
      const int result =
          wait_for > 0 ? io_uring_submit_and_wait(&ring_, wait_for) : io_uring_submit(&ring_);
      if (result >= 0) break;
      // Interrupted, or the kernel wants completions taken first: they are, and it comes back here.
      if (result == -EINTR && wait_for > 0) continue;
      if (result == -EINTR || result == -EAGAIN || result == -EBUSY) break;
      log::error("io", "io_uring stopped working", {{"reason", errno_text(-result)}});
      broken_ = -result;
      break;
    }
    if (wait_for > 0) {
      const Lock lock(mutex_);
      sleeping_ = false;
    }
  }

  void reap() noexcept {
    arrived_count_ = 0;
    std::array<io_uring_cqe*, kBatch> entries;
    const unsigned count = io_uring_peek_batch_cqe(&ring_, entries.data(), kBatch);
    for (unsigned i = 0; i < count; ++i) {
      const std::uint64_t slot = entries[i]->user_data;
      if (slot == kWake) {
        arm_wake();
        continue;
      }
      arrived_[arrived_count_++] = {in_flight_[slot], entries[i]->res};
      in_flight_[slot] = nullptr;
      free_.push_back(slot);
    }
    io_uring_cq_advance(&ring_, count);
  }

  /// The kernel no longer takes our calls: whoever waits is told, now and from now on.
  void fail_everything() noexcept {
    for (std::size_t slot = 0; slot < in_flight_.size(); ++slot) {
      if (in_flight_[slot] == nullptr) continue;
      Request* request = std::exchange(in_flight_[slot], nullptr);
      free_.push_back(slot);
      request->complete(-broken_);
    }
    while (Request* request = queue_.pop()) request->complete(-broken_);
    {
      const Lock lock(mutex_);
      if (!inbox_.empty() || !commands_.empty() || stopping_) return;
      sleeping_ = true;
    }
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_fd_, &count, sizeof(count));
  }

  static constexpr std::uint64_t kWake = ~std::uint64_t{0};

  const std::vector<int> files_;
  int wake_fd_ = -1;
  RankedMutex<LockRank::Uring> mutex_;
  RequestQueue inbox_;                           // guarded by mutex_
  std::vector<std::function<void()>> commands_;  // guarded by mutex_
  bool sleeping_ = false;                        // guarded by mutex_
  bool stopping_ = false;                        // guarded by mutex_

  // The ring's thread's own.
  io_uring ring_{};
  std::unique_ptr<BufferTable> buffers_;
  std::uint64_t wake_count_ = 0;  // what the kernel reads from wake_fd_
  RequestQueue queue_;
  std::vector<Request*> in_flight_;  // by the slot that names a request in the ring
  std::vector<std::size_t> free_;    // slots
  int broken_ = 0;                   // errno of a ring that failed for good
  std::array<Completion, kBatch> arrived_{};
  std::size_t arrived_count_ = 0;

  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(const Engine::Options& options, int& refused) {
  refused = 0;
  auto engine = std::make_unique<UringEngine>(options, refused);
  if (refused != 0) return nullptr;
  return engine;
}

}  // namespace pagoda::io

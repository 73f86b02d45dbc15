// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/fault/fault_engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/start_thread.h"

namespace pagoda::io {
namespace {

/// Completes requests at a later time.
class Delayer {
 public:
  Delayer() : thread_(start_thread([this] { work(); })) {}
  Delayer(const Delayer&) = delete;
  Delayer& operator=(const Delayer&) = delete;
  /// Completes what is left at once.
  ~Delayer() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  /// …and not before `gate`, if there is one, is open.
  void complete_at(Nanos when, std::latch* gate, Request& request, std::int64_t result) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.emplace(when, Delayed{gate, &request, result});
    }
    wake_.notify_all();
  }

 private:
  struct Delayed {
    std::latch* gate;
    Request* request;
    std::int64_t result;
  };

  void work() {
    std::unique_lock lock(mutex_);
    while (!stopping_ || !waiting_.empty()) {
      if (waiting_.empty()) {
        wake_.wait(lock);
        continue;
      }
      const Nanos left = waiting_.begin()->first - now_ns();
      if (left > 0 && !stopping_) {
        wake_.wait_for(lock, std::chrono::nanoseconds(left));
        continue;
      }
      const Delayed next = waiting_.begin()->second;
      waiting_.erase(waiting_.begin());
      lock.unlock();
      if (next.gate != nullptr) {
        require_may_wait();
        next.gate->wait();
      }
      next.request->complete(next.result);
      lock.lock();
    }
  }

  RankedMutex<LockRank::FaultEngine> mutex_;
  Condition wake_;
  std::multimap<Nanos, Delayed> waiting_;  // guarded by mutex_
  bool stopping_ = false;                  // guarded by mutex_
  std::thread thread_;
};

/// Stands in for a request that is struck; lives until the inner engine has answered.
class Struck final : public Request {
 public:
  Struck(Request& original, const Fault& fault, Delayer& delayer)
      : original_(original), fault_(fault), delayer_(delayer) {
    op = original.op;
    priority = original.priority;
    file = original.file;
    data = original.data;
    offset = original.offset;
    length = original.length;
    switch (fault.kind) {
      case FaultKind::Error:
        op = Op::Nothing;
        break;
      case FaultKind::Short:
        // Direct files take whole pages only; what is less is cut off the answer instead.
        length = std::max<Bytes>(1, fault.position % length);
        answer_ = static_cast<std::int64_t>(length);
        length = std::min(original.length, align_up(length, 4096));
        break;
      case FaultKind::FlipBit:
        if (op == Op::Write) {
          copy_ = AlignedBuffer(length);
          std::memcpy(copy_.data(), original.data, length);
          data = copy_.data();
          flip(data);
        }
        break;
      case FaultKind::Delay:
        break;
    }
  }

  void complete(std::int64_t result) noexcept override {
    const std::unique_ptr<Struck> self(this);
    switch (fault_.kind) {
      case FaultKind::Error:
        result = -fault_.error_number;
        break;
      case FaultKind::Short:
        result = std::min(result, answer_);
        break;
      case FaultKind::FlipBit:
        if (op == Op::Read && result > 0) flip(original_.data);
        break;
      case FaultKind::Delay:
        delayer_.complete_at(std::max(now_ns() + fault_.delay, fault_.until), fault_.gate,
                             original_, result);
        return;
    }
    original_.complete(result);
  }

 private:
  void flip(std::byte* bytes) const noexcept {
    const std::uint64_t bit = fault_.position % (original_.length * 8);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }

  Request& original_;
  const Fault fault_;
  Delayer& delayer_;
  std::int64_t answer_ = 0;
  AlignedBuffer copy_;
};

class FaultEngine final : public Engine {
 public:
  FaultEngine(std::unique_ptr<Engine> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}
  ~FaultEngine() override { inner_.reset(); }

  std::string_view name() const noexcept override { return inner_->name(); }

  void submit(RequestList requests) noexcept override {
    RequestList passed;
    while (Request* request = requests.pop()) {
      std::optional<Fault> fault;
      if (request->op != Op::Nothing && request->length > 0) fault = plan_->decide(*request);
      if (fault) {
        passed.push(*new Struck(*request, *fault, delayer_));  // deletes itself
      } else {
        passed.push(*request);
      }
    }
    inner_->submit(passed);
  }

  bool add_buffer(std::span<std::byte> memory) override { return inner_->add_buffer(memory); }
  void remove_buffer(std::span<std::byte> memory) noexcept override {
    inner_->remove_buffer(memory);
  }

 private:
  Delayer delayer_;
  std::unique_ptr<Engine> inner_;
  const std::shared_ptr<FaultPlan> plan_;
};

}  // namespace

std::unique_ptr<Engine> make_fault_engine(std::unique_ptr<Engine> inner,
                                          std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultEngine>(std::move(inner), std::move(plan));
}

}  // namespace pagoda::io

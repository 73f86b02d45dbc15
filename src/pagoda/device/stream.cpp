// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/stream.h"

#include <algorithm>
#include <atomic>

#include "pagoda/base/error.h"
#include "pagoda/device/device.h"
#include "pagoda/device/ordering_checker.h"

namespace pagoda::device {

const char* name(Direction direction) {
  switch (direction) {
    case Direction::HostToDevice:
      return "h2d";
    case Direction::DeviceToHost:
      return "d2h";
    case Direction::DeviceToDevice:
      return "d2d";
    case Direction::HostToHost:
      return "h2h";
  }
  return "?";
}

Stream::Stream(std::shared_ptr<Device> device, std::string name, Ownership ownership,
               std::uint64_t id)
    : device_(std::move(device)),
      name_(std::move(name)),
      id_(id),
      launched_by_others_(ownership == Ownership::Wrapped) {}

Stream::~Stream() = default;

std::uint64_t Stream::next_id() {
  static std::atomic<std::uint64_t> last{0};  // identity only: no engine's state
  return ++last;
}

void* Stream::native_handle() noexcept {
  const IssueLock lock(issue_);
  launched_by_others_ = true;
  return do_native_handle();
}

void Stream::copy_async(void* dst, const void* src, Bytes bytes, Direction direction,
                        std::string_view label) {
  if (bytes == 0) return;
  PAGODA_REQUIRE(dst != nullptr && src != nullptr, "a copy of {} bytes from or to null", bytes);
  const IssueLock lock(issue_);
  if (const auto& checker = device_->checker()) {
    checker->copy(*this, dst, src, bytes, direction, label);
  }
  do_copy(dst, src, bytes, direction, label);
  ++issued_;
}

void Stream::fill_async(void* dst, std::byte value, Bytes bytes, std::string_view label) {
  if (bytes == 0) return;
  PAGODA_REQUIRE(dst != nullptr, "a fill of {} bytes at null", bytes);
  const IssueLock lock(issue_);
  if (const auto& checker = device_->checker()) {
    checker->write(*this, dst, bytes, label.empty() ? "fill" : fmt::format("fill '{}'", label));
  }
  do_fill(dst, value, bytes, label);
  ++issued_;
}

void Stream::enqueue(std::string_view label, std::function<void()> fn,
                     std::initializer_list<Use> uses) {
  PAGODA_REQUIRE(fn != nullptr, "an empty function was enqueued on '{}'", name_);
  const IssueLock lock(issue_);
  if (const auto& checker = device_->checker()) {
    const std::string what = fmt::format("function '{}'", label);
    for (const Use& use : uses) {
      if (use.how == Use::How::Reads) {
        checker->read(*this, use.data, use.bytes, what);
      } else {
        checker->write(*this, use.data, use.bytes, what);
      }
    }
  }
  do_enqueue(label, std::move(fn));
  ++issued_;
}

void Stream::record(Event& event) {
  PAGODA_REQUIRE(&event.device() == device_.get(), "'{}' records an event of another device",
                 name_);
  const IssueLock lock(issue_);
  record(event, lock);
}

void Stream::record(Event& event, const IssueLock&) {
  do_record(event);
  if (const auto& checker = device_->checker()) checker->recorded(*this, event);
}

void Stream::wait(Event& event, OnFailure on_failure) {
  PAGODA_REQUIRE(event.device().kind() == device_->kind(),
                 "'{}' waits for an event of a device of another kind", name_);
  const IssueLock lock(issue_);
  do_wait(event, on_failure);
  if (const auto& checker = device_->checker()) checker->waited(*this, event);
  ++issued_;  // a mark taken before this does not cover what comes after it
}

std::shared_ptr<Event> Stream::recycled_event(const IssueLock&) {
  constexpr std::size_t kTries = 4;      // a fence may keep an event for long: look past a few
  constexpr std::size_t kRecycled = 64;  // beyond, an event dies with its fences
  for (std::size_t i = 0; i < std::min(kTries, marks_.size()); ++i) {
    std::shared_ptr<Event> event = std::move(marks_.front());
    marks_.pop_front();
    marks_.push_back(event);
    if (event.use_count() == 2) return event;  // here and in marks_
  }
  std::shared_ptr<Event> event = device_->make_event();
  if (marks_.size() < kRecycled) marks_.push_back(event);
  return event;
}

Mark Stream::mark() {
  const IssueLock lock(issue_);
  const bool unchanged = !launched_by_others_ && last_mark_.position == issued_;
  if (unchanged && last_mark_.event) {
    // The old record covers what the stream has learnt since: that was over without it.
    if (const auto& checker = device_->checker()) checker->recorded(*this, *last_mark_.event);
    return last_mark_;
  }
  last_mark_ = {};
  std::shared_ptr<Event> event = recycled_event(lock);
  record(*event, lock);
  if (launched_by_others_) ++issued_;
  last_mark_ = {std::move(event), id_, issued_};
  return last_mark_;
}

bool Stream::idle() {
  OrderingChecker* checker = device_->checker().get();
  if (checker == nullptr) return do_idle();
  const VectorClock issued = checker->issued_on(*this);
  const bool over = do_idle();
  if (over) checker->acquire(issued);
  return over;
}

void Stream::synchronize() {
  OrderingChecker* checker = device_->checker().get();
  VectorClock issued;
  if (checker != nullptr) issued = checker->issued_on(*this);
  do_drain();
  if (checker != nullptr) checker->acquire(issued);
  do_rethrow();
}

}  // namespace pagoda::device

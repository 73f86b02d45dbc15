// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/emulated/emulated_event.h"

#include "pagoda/base/error.h"

namespace pagoda::device::emulated {

void Ticket::set(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  done_ = true;
  failure_ = std::move(failure);
  time_ = now_ns();
  changed_.notify_all();
}

std::exception_ptr Ticket::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  return failure_;
}

bool Ticket::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

Nanos Ticket::time() const {
  const std::lock_guard lock(mutex_);
  PAGODA_REQUIRE(done_, "the event has not happened yet");
  return time_;
}

std::shared_ptr<Ticket> EmulatedEvent::renew() {
  auto ticket = std::make_shared<Ticket>();
  const std::lock_guard lock(mutex_);
  ticket_ = ticket;
  return ticket;
}

std::shared_ptr<Ticket> EmulatedEvent::ticket() const {
  const std::lock_guard lock(mutex_);
  return ticket_;
}

void EmulatedEvent::do_wait() {
  const std::shared_ptr<Ticket> ticket = this->ticket();
  if (!ticket) return;
  if (const std::exception_ptr failure = ticket->wait()) std::rethrow_exception(failure);
}

bool EmulatedEvent::do_done() {
  const std::shared_ptr<Ticket> ticket = this->ticket();
  return !ticket || ticket->done();
}

double EmulatedEvent::do_seconds_since(Event& begin) {
  const std::shared_ptr<Ticket> first = static_cast<EmulatedEvent&>(begin).ticket();
  const std::shared_ptr<Ticket> last = ticket();
  PAGODA_REQUIRE(first && last, "the event was never recorded");
  return static_cast<double>(last->time() - first->time()) * 1e-9;
}

}  // namespace pagoda::device::emulated

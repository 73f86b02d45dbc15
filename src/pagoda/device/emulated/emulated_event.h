// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <memory>

#include "pagoda/base/clock.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/event.h"

namespace pagoda::device::emulated {

/// One record of an event: set once by the stream's thread, waited for by anyone.
class Ticket {
 public:
  void set(std::exception_ptr failure);
  /// Returns when it is set; the failure of the work before the record, or null.
  std::exception_ptr wait();
  bool done() const;
  Nanos time() const;

 private:
  mutable RankedMutex<LockRank::EmulatedTicket> mutex_;
  Condition changed_;
  bool done_ = false;           // guarded by mutex_
  std::exception_ptr failure_;  // guarded by mutex_
  Nanos time_ = 0;              // guarded by mutex_
};

/// An event as its latest ticket: who waits takes the ticket, so recording anew moves nobody.
class EmulatedEvent final : public Event {
 public:
  explicit EmulatedEvent(std::shared_ptr<Device> device) : Event(std::move(device)) {}

  /// A new record: its ticket, to be set when the stream gets there.
  std::shared_ptr<Ticket> renew();
  /// Null if never recorded.
  std::shared_ptr<Ticket> ticket() const;

 private:
  void do_wait() override;
  bool do_done() override;
  double do_seconds_since(Event& begin) override;

  mutable RankedMutex<LockRank::EmulatedEvent> mutex_;
  std::shared_ptr<Ticket> ticket_;  // guarded by mutex_
};

}  // namespace pagoda::device::emulated

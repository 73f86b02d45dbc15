// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/event.h"

#include "pagoda/base/error.h"
#include "pagoda/device/device.h"
#include "pagoda/device/ordering_checker.h"

namespace pagoda::device {

Event::Event(std::shared_ptr<Device> device) : device_(std::move(device)) {}

Event::~Event() = default;

void Event::wait() {
  OrderingChecker* checker = device_->checker().get();
  if (checker == nullptr) return do_wait();
  // Taken before the wait: a record made meanwhile is not what was waited for.
  const VectorClock covered = checker->covered_by(*this);
  try {
    do_wait();
  } catch (...) {  // it failed, but it is over
    checker->acquire(covered);
    throw;
  }
  checker->acquire(covered);
}

bool Event::done() {
  OrderingChecker* checker = device_->checker().get();
  if (checker == nullptr) return do_done();
  const VectorClock covered = checker->covered_by(*this);
  const bool over = do_done();
  if (over) checker->acquire(covered);
  return over;
}

double Event::seconds_since(Event& begin) {
  PAGODA_REQUIRE(device_ == begin.device_, "the two events are of different devices");
  return do_seconds_since(begin);
}

}  // namespace pagoda::device

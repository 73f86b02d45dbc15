// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "pagoda/device/vector_clock.h"

namespace pagoda::device {

class Device;

/// What an event must be good for.
struct EventOptions {
  /// Keep the time of completion, for seconds_since(). Costs a little on CUDA.
  bool timing = false;
  /// wait() sleeps instead of spinning: frees the core, wakes some tens of microseconds later.
  bool blocking = false;
};

/// A point in a stream that others can wait for; made by Device::make_event().
///
/// Stream::record() puts it there; recording again moves it, and whoever waited before still waits
/// for the old point. An event never recorded counts as done. See docs/notes/ordering.md. All
/// members may be called from any thread.
class Event {
 public:
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event();

  /// Returns once all that was issued to the stream before the record is over. Rethrows the first
  /// failure among it, every time it is called.
  void wait();
  /// Whether wait() would return or throw at once. Does not throw the work's own failures.
  bool done();
  /// Seconds between two recorded, finished events that were made with `timing`.
  double seconds_since(Event& begin);

  Device& device() const noexcept { return *device_; }

 protected:
  explicit Event(std::shared_ptr<Device> device);

 private:
  friend class OrderingChecker;

  virtual void do_wait() = 0;
  virtual bool do_done() = 0;
  virtual double do_seconds_since(Event& begin) = 0;

  std::shared_ptr<Device> device_;
  VectorClock recorded_;  // what the record covers; guarded by the ordering checker's lock
};

}  // namespace pagoda::device

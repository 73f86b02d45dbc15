// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace pagoda::comm {

/// Calls that ended well, and the bytes that this rank sent to and received from others in them.
struct Traffic {
  std::uint64_t calls = 0;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;

  Traffic& operator+=(const Traffic& other) noexcept {
    calls += other.calls;
    sent += other.sent;
    received += other.received;
    return *this;
  }
};

/// A group's traffic by kind. A point-to-point message counts with the size of the receiver's span.
struct GroupStats {
  Traffic gather;
  Traffic all_to_all;
  Traffic broadcast;
  Traffic point_to_point;
  Traffic control;  ///< barriers and reductions of control values

  Traffic total() const noexcept {
    Traffic sum = gather;
    return sum += all_to_all, sum += broadcast, sum += point_to_point, sum += control;
  }
};

/// Traffic that any thread may add to and read. A reader may see a call's parts one by one.
class TrafficMeter {
 public:
  void add(std::uint64_t sent, std::uint64_t received) noexcept {
    calls_.fetch_add(1, std::memory_order_relaxed);
    sent_.fetch_add(sent, std::memory_order_relaxed);
    received_.fetch_add(received, std::memory_order_relaxed);
  }

  Traffic read() const noexcept {
    return {calls_.load(std::memory_order_relaxed), sent_.load(std::memory_order_relaxed),
            received_.load(std::memory_order_relaxed)};
  }

 private:
  std::atomic<std::uint64_t> calls_ = 0;
  std::atomic<std::uint64_t> sent_ = 0;
  std::atomic<std::uint64_t> received_ = 0;
};

}  // namespace pagoda::comm

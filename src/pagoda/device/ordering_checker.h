// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/base/error.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/access_map.h"
#include "pagoda/device/memory.h"
#include "pagoda/device/stream.h"
#include "pagoda/device/vector_clock.h"

namespace pagoda::device {

/// Bytes were used without the event that makes it safe, or outside a live block.
class OrderingViolation : public EngineError {
 public:
  using EngineError::EngineError;
};

/// Follows who may know what to be over (streams, events, host threads), and which bytes of arenas
/// and Memory were last read and written by whom. Fails when a use is not ordered after an earlier
/// one it conflicts with, whether or not the bytes happened to be right this time.
///
/// Streams, events, copies and arenas report to it when it is attached to their Device; kernels and
/// host code are reported by whoever runs them. A violation is thrown at the call that is at fault
/// (which then has no effect) and kept for check(). The rules are in docs/notes/ordering.md. All
/// members may be called from any thread.
class OrderingChecker {
 public:
  /// Whether what one host thread has waited for counts as known to all.
  enum class HostThreads {
    Together,  ///< yes: they hand work over by locks that are not seen here (TSan sees those)
    Separate,  ///< no: a hand-over is told by publish() and acquire()
  };

  explicit OrderingChecker(HostThreads host_threads = HostThreads::Together);
  OrderingChecker(const OrderingChecker&) = delete;
  OrderingChecker& operator=(const OrderingChecker&) = delete;
  /// Logs violations that nobody has taken.
  ~OrderingChecker();

  /// A new checker if PAGODA_CHECK_ORDER is 1, null if it is unset, empty or 0.
  static std::shared_ptr<OrderingChecker> from_environment();

  /// An operation just about to be launched on `stream` reads or writes these bytes. `what` as the
  /// message should say it: "kernel 'addmm'".
  void read(const Stream& stream, const void* data, Bytes bytes, std::string_view what);
  void write(const Stream& stream, const void* data, Bytes bytes, std::string_view what);
  /// This thread reads or writes these bytes now.
  void host_read(const void* data, Bytes bytes, std::string_view what);
  void host_write(const void* data, Bytes bytes, std::string_view what);

  /// What this thread knows to be over, for another thread to acquire().
  VectorClock publish();
  void acquire(const VectorClock& known);

  /// Throws the first violation that has not been taken.
  void check() const;
  /// All violations so far; forgets them.
  std::vector<std::string> take_violations();

  // Reported by this layer itself.
  void copy(const Stream& stream, const void* dst, const void* src, Bytes bytes,
            Direction direction, std::string_view label);
  void recorded(const Stream& stream, Event& event);
  void waited(const Stream& stream, const Event& event);
  VectorClock covered_by(const Event& event) const;
  VectorClock issued_on(const Stream& stream);
  void added_memory(const Memory& memory, std::string_view name);
  void removed_memory(const void* data);
  /// From now on these bytes may be used inside live blocks only.
  void managed_by_arena(const void* data);
  /// `stream` may use the block at once; null: the host may.
  void allocated(const void* data, Bytes bytes, std::string_view block, const Stream* stream);
  void freed(const void* data);

 private:
  using Lock = RankedGuard<LockRank::OrderingChecker>;
  enum class Mode { Read, Write };

  struct BlockName {
    std::uintptr_t end = 0;
    std::string name;
  };
  struct Region {
    std::uintptr_t end = 0;
    MemoryKind kind = MemoryKind::Device;
    std::string name;
    bool managed = false;
    std::map<std::uintptr_t, BlockName> live;   // by first byte
    std::map<std::uintptr_t, BlockName> freed;  // what was last at bytes that are free now
    AccessMap accesses;
  };
  struct Actor {
    std::string name;  // "stream 'copy'"
    bool host = false;
    VectorClock clock;
  };

  std::size_t host(const Lock&);
  std::size_t actor(const Stream& stream, const Lock&);
  /// The stream's actor, after it has learnt what the issuing thread knows.
  std::size_t issue(const Stream& stream, const Lock& lock);
  std::map<std::uintptr_t, Region>::iterator find(std::uintptr_t at, const Lock&);
  void use(std::size_t actor, Mode mode, const void* data, Bytes bytes, std::string_view what,
           const Lock& lock);
  void check_bounds(const Region& region, std::uintptr_t begin, std::uintptr_t end,
                    const std::string& who, const Lock& lock);
  void check_kind(const void* data, MemoryKind kind, std::string_view what, const Lock& lock);
  std::string describe(const Region& region, std::uintptr_t begin, std::uintptr_t end,
                       const Lock&) const;
  [[noreturn]] void fail(std::string message, const Lock&);

  const HostThreads host_threads_;
  mutable RankedMutex<LockRank::OrderingChecker> mutex_;
  std::vector<Actor> actors_;                                 // guarded by mutex_
  std::unordered_map<std::uint64_t, std::size_t> streams_;    // guarded by mutex_, by Stream::id()
  std::unordered_map<std::thread::id, std::size_t> threads_;  // guarded by mutex_
  std::map<std::uintptr_t, Region> regions_;                  // guarded by mutex_, by first byte
  std::vector<std::string> violations_;                       // guarded by mutex_
};

}  // namespace pagoda::device

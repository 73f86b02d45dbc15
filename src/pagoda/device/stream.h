// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "pagoda/base/bytes.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/event.h"
#include "pagoda/device/use.h"

namespace pagoda::device {

/// From where to where a copy goes.
enum class Direction { HostToDevice, DeviceToHost, DeviceToDevice, HostToHost };

/// "h2d", "d2h", "d2d" or "h2h".
const char* name(Direction direction);

struct StreamOptions {
  /// Shown in errors, and as the stream's track in traces.
  std::string name = "stream";
  /// As CUDA counts: a lower number is more urgent. Clamped to what the device has.
  int priority = 0;
};

/// A point in a stream, with what is needed to tell whether another point of it is later.
struct Mark {
  std::shared_ptr<Event> event;
  std::uint64_t stream = 0;    // Stream::id()
  std::uint64_t position = 0;  // grows along the stream
};

/// An ordered queue of device work; made by Device::make_stream().
///
/// Work runs in the order of issue; two streams run at the same time unless an event orders them.
/// The memory an operation uses must live until it is over (a Block takes care of that by itself).
/// Work after a failed operation is dropped until synchronize() has thrown the failure; CUDA drops
/// functions only. See docs/notes/ordering.md. All members may be called from any thread;
/// destroying a stream waits for its work.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  /// What wait() does when the work it waits for has failed.
  enum class OnFailure {
    Inherit,  ///< this stream's later work is dropped too, and it reports the same failure
    Ignore,   ///< only the order matters: the memory's former user failed, not this one
  };

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream();

  const std::string& name() const noexcept { return name_; }
  Device& device() const noexcept { return *device_; }
  /// The same for two wrappers of one native stream, otherwise unique in the process.
  std::uint64_t id() const noexcept { return id_; }
  /// The cudaStream_t; null elsewhere. Whoever asks may launch on it behind our back, so from then
  /// on every mark() is a new one.
  void* native_handle() noexcept;

  /// Copies `bytes`, which must not overlap. `label` names the copy in errors and traces.
  void copy_async(void* dst, const void* src, Bytes bytes, Direction direction,
                  std::string_view label = {});
  /// Sets device memory (or pinned) to `value`.
  void fill_async(void* dst, std::byte value, Bytes bytes, std::string_view label = {});
  /// Runs `fn` on a host thread in stream order. It may not call a device, stream or event. What
  /// it throws arrives at the next synchronize() of this stream or wait() of a later event. `uses`
  /// are the arena bytes it reads and writes.
  void enqueue(std::string_view label, std::function<void()> fn,
               std::initializer_list<Use> uses = {});

  /// Moves `event` to the end of what has been issued so far.
  void record(Event& event);
  /// Work issued from now on starts after `event`'s last record. Does not block the caller.
  void wait(Event& event, OnFailure on_failure = OnFailure::Inherit);
  /// The end of what has been issued so far. Events are recycled, and shared while nothing new is
  /// issued, so this is cheap.
  Mark mark();

  /// Whether what is issued now becomes part of a CUDA graph instead of running.
  virtual bool capturing() const { return false; }
  /// Whether all work is over.
  bool idle();
  /// Waits until all work issued so far is over. Rethrows its first failure, once; the stream is
  /// then usable again.
  void synchronize();

 protected:
  enum class Ownership { Owned, Wrapped };

  Stream(std::shared_ptr<Device> device, std::string name, Ownership ownership, std::uint64_t id);
  /// An id that no other stream has.
  static std::uint64_t next_id();

 private:
  friend class Device;
  using IssueLock = std::lock_guard<RankedRecursiveMutex<LockRank::Stream>>;

  virtual void* do_native_handle() const noexcept { return nullptr; }
  virtual void do_copy(void* dst, const void* src, Bytes bytes, Direction direction,
                       std::string_view label) = 0;
  virtual void do_fill(void* dst, std::byte value, Bytes bytes, std::string_view label) = 0;
  virtual void do_enqueue(std::string_view label, std::function<void()> fn) = 0;
  virtual void do_record(Event& event) = 0;
  virtual void do_wait(Event& event, OnFailure on_failure) = 0;
  virtual bool do_idle() = 0;
  /// Waits; leaves a failure where it is.
  virtual void do_drain() = 0;
  /// Throws the failure and forgets it, if there is one.
  virtual void do_rethrow() = 0;

  void record(Event& event, const IssueLock& lock);
  std::shared_ptr<Event> recycled_event(const IssueLock& lock);

  const std::shared_ptr<Device> device_;
  const std::string name_;
  const std::uint64_t id_;
  // Held over "tell the checker, then issue", so that both see one order. Recursive, for the host
  // device runs work inside the call, and dropping a function may free a block of this stream.
  RankedRecursiveMutex<LockRank::Stream> issue_;
  bool launched_by_others_;   // guarded by issue_: what is issued is not all there is
  std::uint64_t issued_ = 0;  // guarded by issue_
  Mark last_mark_;            // guarded by issue_
  std::deque<std::shared_ptr<Event>> marks_;  // guarded by issue_: recycled by mark()
};

}  // namespace pagoda::device

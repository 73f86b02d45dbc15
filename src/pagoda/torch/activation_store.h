// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/thread_pool.h"
#include "pagoda/device/stream.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::torch {

/// Keeps what autograd saves for backward off the device, in an engine's tiers and budgets. One per
/// engine: a storage that two forwards save is kept once.
///
/// Saved tensors share their storage with every alias, so what plain autograd reads in backward are
/// the bytes that the storage has then, whoever wrote them last and whichever version counter that
/// moved. pack() therefore copies nothing: it takes a reference to the storage. Only when that is
/// the last reference, and nobody can write any more, are the bytes copied off the device, by a
/// thread of their own, and the device's memory freed; unpack() brings them back, and prefetches
/// what was saved before, for that is what backward asks for next. See docs/notes/activations.md.
///
/// What is no plain strided tensor of this engine's device, or fits into no budget, stays where it
/// is. Any thread may call the store, and drop what it returns: that waits for nobody, for whoever
/// drops a graph in Python holds the interpreter's lock, which the copying thread may need. In a
/// forked process calls throw, and what is dropped is leaked.
class ActivationStore : public std::enable_shared_from_this<ActivationStore> {
 public:
  /// How a forward wants its activations kept.
  struct Policy {
    pager::Placement placement = pager::Placement::Host;
    /// Smaller storages stay on the device.
    Bytes least = 16_KiB;
    /// Of the device's bytes, how many may wait to be copied off it, or be back ahead of their use.
    Bytes in_flight = 64_MiB;
  };
  /// The stream on which this thread's operators run; null where the device is the host.
  using Consumer = std::function<std::shared_ptr<device::Stream>()>;

  struct Kept;
  struct Use;
  /// What autograd keeps instead of a tensor.
  struct Saved {
    at::Tensor tensor;         // stays where it is; undefined: over a kept storage
    std::shared_ptr<Use> use;  // …of this one, with the following geometry
    c10::DispatchKeySet keys;  // with the lazy conjugate and negative bits
    caffe2::TypeMeta dtype;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset = 0;
    // Autograd checks versions only where there are no hooks, so unpack() does.
    c10::VariableVersion version{c10::VariableVersion::DISABLED};
    std::uint32_t saved_version = 0;
  };

  /// Made by std::make_shared. `pool` has one thread and ends before the tiers; its tasks keep the
  /// store alive.
  ActivationStore(pager::Tiers& tiers, ThreadPool& pool, c10::Device device, Consumer consumer);
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;

  Saved pack(const at::Tensor& tensor, const Policy& policy);
  /// What plain autograd would read now. c10::Error, as autograd's own, if the tensor has been
  /// modified in place since it was saved.
  at::Tensor unpack(const Saved& saved);
  /// Starts copying what has no other reference any more; pack() and unpack() do some of this.
  void sweep();

  /// For tests of timing. sweep(), then waits until all of it has left.
  void flush();
  /// For tests of timing. While paused, what would leave waits to be copied.
  void pause(bool paused);

 private:
  struct Section;  // holds the lock
  using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;
  using KeptList = std::list<Kept*>;

  bool can_leave(const at::Tensor& tensor, const Policy& policy) const;
  bool capturing() const;
  std::shared_ptr<Kept> kept_for(const at::Tensor& tensor, const Policy& policy, Section& section);
  void sweep_fresh(std::size_t at_most, std::uint64_t below, Section& section);
  void sweep_restored(Section& section);
  void leave(Kept& kept, Section& section);
  bool make_home(Kept& kept, Bytes bytes);
  void write(const std::shared_ptr<Kept>& kept, std::uint64_t turn, Bytes bytes);
  void wait_until_written(Bytes in_flight, Section& section);

  StorageRef bring_back(const std::shared_ptr<Kept>& kept);
  void start_reading(const std::shared_ptr<Kept>& kept, StorageRef storage, Section& section);
  void read(Kept& kept);
  void arrive(Kept& kept, Section& section);
  std::uint64_t prefetch_before(std::uint64_t number, Bytes window);
  StorageRef empty_storage(Bytes bytes) const;
  void use_on_this_stream(const Kept& kept, const c10::StorageImpl& storage);
  template <class Fn>
  void through_staging(Bytes bytes, Fn&& piece);
  void put(Kept& kept, KeptList* list, Section& section);
  void forget(const Use& use) noexcept;
  void forget(Kept& kept) noexcept;

  const io::OwnerProcess owner_;
  pager::Tiers& tiers_;
  ThreadPool& pool_;
  const c10::Device device_;
  const Consumer consumer_;
  std::shared_ptr<device::Stream> copies_;  // null where the device is the host
  pager::HostBlock staging_;  // between device and files; the pool's, once leave() has made it

  RankedMutex<LockRank::ActivationStore> mutex_;
  Condition written_;
  // The rest is guarded by mutex_.
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, Kept*> by_number_;                       // one for each saved tensor
  std::unordered_map<const c10::StorageImpl*, Kept*> by_storage_;  // those that are here
  KeptList fresh_;            // here since they were saved: they leave as soon as they may
  KeptList restored_;         // here again: they leave when they are too many
  Bytes restored_bytes_ = 0;  // of those
  Bytes leaving_ = 0;         // not copied yet
  Bytes ahead_ = 0;           // back, not asked for
  bool told_ = false;         // that something stays for want of room
  bool told_of_failure_ = false;
  bool paused_ = false;
  std::vector<std::function<void()>> held_back_;  // copies, while paused
};

}  // namespace pagoda::torch

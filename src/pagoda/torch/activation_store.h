// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pagoda/base/thread_pool.h"
#include "pagoda/device/stream.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::torch {

/// Keeps what autograd saves for backward off the device, in an engine's tiers and budgets.
///
/// pack() starts a copy on a thread of its own and lets the device's bytes go when it is over;
/// unpack() brings them back, exactly, and what was saved just before it with them, for that is
/// what backward asks for next. A storage is kept once, however many tensors of it are saved. What
/// fits into no budget stays where it is. Any thread may call it, and drop it: it waits for nobody,
/// for whoever drops a graph in Python holds the lock that the copying thread may need.
class ActivationStore : public std::enable_shared_from_this<ActivationStore> {
 public:
  struct Options {
    pager::Placement placement = pager::Placement::Host;
    /// Smaller storages are not worth the way.
    Bytes least = 16_KiB;
    /// Of the device's bytes, how many may wait to be copied off it, or be back ahead of their use.
    Bytes in_flight = 64_MiB;
    /// Storages that somebody else keeps anyway: a model's buffers.
    std::unordered_set<const c10::StorageImpl*> staying;
  };
  /// The stream on which this thread's operators run; null where the device is the host.
  using Consumer = std::function<std::shared_ptr<device::Stream>()>;

  struct Kept;
  /// A saved tensor: its geometry, over a storage that is kept.
  struct Saved {
    std::shared_ptr<Kept> kept;
    at::TensorOptions options;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset = 0;
  };

  /// Made by std::make_shared. `pool` has one thread and ends before the tiers; its tasks keep the
  /// store alive.
  ActivationStore(pager::Tiers& tiers, ThreadPool& pool, Consumer consumer, Options options);
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;

  /// Nothing: the tensor had better stay where it is.
  std::optional<Saved> pack(const at::Tensor& tensor);
  at::Tensor unpack(const Saved& saved);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void write(const std::shared_ptr<Kept>& kept);
  void start_reading(const std::shared_ptr<Kept>& kept, const Lock& lock);
  void read(Kept& kept);
  template <class Fn>
  void through_staging(const Kept& kept, Fn&& piece);
  void prefetch_before(std::uint64_t number, std::vector<std::shared_ptr<Kept>>& seen,
                       const Lock& lock);
  void forget(const Kept& kept) noexcept;

  pager::Tiers& tiers_;
  ThreadPool& pool_;
  const Consumer consumer_;
  const Options options_;
  std::shared_ptr<device::Stream> copies_;  // null where the device is the host
  pager::HostBlock staging_;  // between device and files; the pool's, once pack() has made it

  std::mutex mutex_;
  std::condition_variable written_;
  std::uint64_t next_ = 0;                                  // guarded by mutex_
  std::map<std::uint64_t, std::weak_ptr<Kept>> by_number_;  // guarded by mutex_: in pack()'s order
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Kept>> by_storage_;  // by mutex_
  bool told_ = false;  // guarded by mutex_: that something stays
  Bytes leaving_ = 0;  // guarded by mutex_: not copied yet
  Bytes ahead_ = 0;    // guarded by mutex_: back, not asked for
};

}  // namespace pagoda::torch

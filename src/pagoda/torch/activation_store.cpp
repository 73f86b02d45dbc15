// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/activation_store.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/record_function.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/storage_table.h"

namespace pagoda::torch {

/// One storage. Its bytes are in `source`, in `home`, or in both.
struct ActivationStore::Kept {
  ~Kept() {
    if (const auto alive = store.lock()) alive->forget(*this);
  }

  std::weak_ptr<ActivationStore> store;
  std::uint64_t number = 0;
  const c10::StorageImpl* key = nullptr;
  // Keeps the key from being used again.
  c10::weak_intrusive_ptr<c10::StorageImpl> address{c10::intrusive_ptr<c10::StorageImpl>()};
  Bytes bytes = 0;
  c10::Device device = c10::Device(c10::kCPU);
  c10::VariableVersion version{c10::VariableVersion::DISABLED};
  std::uint32_t saved_version = 0;
  device::Mark ready;  // the operator that made it

  // Guarded by the store's mutex.
  c10::Storage source;  // until it is written; then empty
  pager::Home home;
  bool torn = false;  // somebody wrote to it while it was copied
  std::exception_ptr error;
  std::shared_future<void> reading;  // valid while `back` is being filled
  c10::Storage back;                 // brought ahead of its use
  bool counted_ahead = false;
  c10::weak_intrusive_ptr<c10::StorageImpl> used{c10::intrusive_ptr<c10::StorageImpl>()};
};

namespace {

constexpr std::string_view kActivations = "activations";
constexpr Bytes kStaging = 8_MiB;

c10::Storage empty_storage(Bytes bytes, c10::Device device) {
  const at::Tensor flat = at::empty({static_cast<std::int64_t>(bytes)},
                                    at::TensorOptions().dtype(at::kByte).device(device));
  return flat.storage();
}

}  // namespace

ActivationStore::ActivationStore(pager::Tiers& tiers, ThreadPool& pool, Consumer consumer,
                                 Options options)
    : tiers_(tiers), pool_(pool), consumer_(std::move(consumer)), options_(std::move(options)) {
  if (!tiers_.device_is_host()) copies_ = tiers_.device()->make_stream({"activations", 0});
}

std::optional<ActivationStore::Saved> ActivationStore::pack(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.layout() != at::kStrided ||
      tensor.is_meta()) {
    return std::nullopt;
  }
  const c10::Storage& storage = tensor.storage();
  const Bytes bytes = storage.nbytes();
  const bool on_device =
      tensor.device().is_cpu() ? copies_ == nullptr : copies_ != nullptr;  // else it is not ours
  if (!on_device || bytes < options_.least ||
      options_.staying.contains(storage.unsafeGetStorageImpl()) ||
      StorageTable::instance().find(storage.unsafeGetStorageImpl()) != nullptr) {
    return std::nullopt;
  }
  // A little of something large would keep all of it.
  if (bytes / 4 > tensor.nbytes()) return std::nullopt;
  Saved saved{nullptr, tensor.options().requires_grad(false), tensor.sizes().vec(),
              tensor.strides().vec(), tensor.storage_offset()};
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  const auto count = tensor.is_inference() ? 0 : version.current_version();

  std::shared_ptr<Kept> kept;  // before the lock: what it lets go takes the lock itself
  Lock lock(mutex_);
  const auto known = by_storage_.find(storage.unsafeGetStorageImpl());
  if (known != by_storage_.end()) kept = known->second.lock();
  if (kept != nullptr && kept->saved_version == count && !kept->address.expired()) {
    saved.kept = kept;
    return saved;
  }
  pager::Home home;
  try {
    home = tiers_.allocate(bytes, options_.placement, kActivations, "saved for backward");
    if (copies_ != nullptr && home.tier() == pager::Tier::Nvme && staging_.data() == nullptr) {
      // Now: when the copy runs, the host may be full.
      staging_ = tiers_.host().allocate(kStaging, pager::tag::kStaging, "saved for backward");
    }
  } catch (const UserError& error) {
    if (!std::exchange(told_, true)) {
      log::warn("torch", "activations stay on the device: there is no room for them",
                {{"cause", error.message()}});
    }
    return std::nullopt;
  }
  lock.unlock();
  kept = std::make_shared<Kept>();
  lock.lock();
  kept->store = weak_from_this();
  kept->number = next_++;
  kept->key = storage.unsafeGetStorageImpl();
  kept->address = storage.getWeakStorageImpl();
  kept->bytes = bytes;
  kept->device = tensor.device();
  if (!tensor.is_inference()) kept->version = version;
  kept->saved_version = static_cast<std::uint32_t>(count);
  if (const auto stream = consumer_()) kept->ready = stream->mark();
  kept->source = storage;
  kept->home = std::move(home);
  by_number_[kept->number] = kept;
  by_storage_[kept->key] = kept;
  leaving_ += bytes;
  (void)pool_.submit([self = shared_from_this(), kept] { self->write(kept); });
  // Forward is no faster than what it saves can leave.
  written_.wait(lock, [&] { return leaving_ <= std::max(options_.in_flight, bytes); });
  saved.kept = kept;
  return saved;
}

void ActivationStore::write(const std::shared_ptr<Kept>& kept) {
  std::exception_ptr error;
  c10::Storage source;
  {
    const Lock lock(mutex_);
    source = kept->source;
  }
  // Nobody but this task needs it any more: the graph is gone, and the copy with it.
  if (kept.use_count() > 1) {
    try {
      const auto* data = static_cast<const std::byte*>(source.data());
      if (copies_ == nullptr) {
        tiers_.write(kept->home, 0, {data, kept->bytes});
      } else {
        copies_->wait(*kept->ready.event);
        if (kept->home.tier() == pager::Tier::Host) {
          copies_->copy_async(kept->home.data(), data, kept->bytes, device::Direction::DeviceToHost,
                              kActivations);
          copies_->synchronize();
        } else {
          through_staging(*kept, [&](Bytes at, std::span<std::byte> staging) {
            copies_->copy_async(staging.data(), data + at, staging.size(),
                                device::Direction::DeviceToHost, kActivations);
            copies_->synchronize();
            tiers_.write(kept->home, at, staging);
          });
        }
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  {
    const Lock lock(mutex_);
    kept->error = error;
    kept->torn = kept->version.enabled() && kept->version.current_version() != kept->saved_version;
    // What failed or was written to meanwhile is not what was saved.
    if (error == nullptr) kept->source = c10::Storage();
    leaving_ -= kept->bytes;
  }
  written_.notify_all();
}

/// Gets device memory and has it filled. Holds the lock; the caller's thread runs operators.
void ActivationStore::start_reading(const std::shared_ptr<Kept>& kept, const Lock& /*lock*/) {
  const at::DisableRecordFunctionGuard unseen;
  kept->back = empty_storage(kept->bytes, kept->device);
  if (const auto stream = consumer_()) kept->ready = stream->mark();  // its memory is free then
  kept->reading =
      pool_.submit([self = shared_from_this(), kept] { self->read(*kept); }, Priority::Urgent)
          .share();
}

void ActivationStore::read(Kept& kept) {
  auto* data = static_cast<std::byte*>(kept.back.mutable_data());
  if (copies_ == nullptr) {
    tiers_.read(kept.home, 0, {data, kept.bytes});
    return;
  }
  copies_->wait(*kept.ready.event);
  if (kept.home.tier() == pager::Tier::Host) {
    copies_->copy_async(data, kept.home.data(), kept.bytes, device::Direction::HostToDevice,
                        kActivations);
    copies_->synchronize();
    return;
  }
  through_staging(kept, [&](Bytes at, std::span<std::byte> staging) {
    tiers_.read(kept.home, at, staging);
    copies_->copy_async(data + at, staging.data(), staging.size(), device::Direction::HostToDevice,
                        kActivations);
    copies_->synchronize();
  });
}

/// On the pool's one thread.
template <class Fn>
void ActivationStore::through_staging(const Kept& kept, Fn&& piece) {
  for (Bytes at = 0; at < kept.bytes; at += kStaging) {
    piece(at, std::span(staging_.data(), std::min(kStaging, kept.bytes - at)));
  }
}

at::Tensor ActivationStore::unpack(const Saved& saved) {
  const std::shared_ptr<Kept>& kept = saved.kept;
  c10::Storage storage;
  std::shared_future<void> reading;
  {
    Lock lock(mutex_);
    if (kept->error != nullptr) std::rethrow_exception(kept->error);
    const bool changed = kept->source && kept->version.enabled() &&
                         kept->version.current_version() != kept->saved_version;
    PAGODA_REQUIRE(!kept->torn && !changed,
                   "a tensor that backward needs has been modified by an in-place operation since "
                   "it was saved");
    if (kept->source) {
      storage = kept->source;  // it has not left yet
    } else if (auto again = kept->used.lock()) {
      storage = c10::Storage(std::move(again));  // two tensors of it, or two passes
    } else {
      if (!kept->back) start_reading(kept, lock);
      storage = kept->back;
      reading = kept->reading;
    }
  }
  if (reading.valid()) reading.get();
  std::vector<std::shared_ptr<Kept>> seen;  // before the lock, as above
  {
    Lock lock(mutex_);
    if (kept->counted_ahead) ahead_ -= kept->bytes;
    kept->counted_ahead = false;
    kept->back = c10::Storage();
    kept->used = storage.getWeakStorageImpl();
    prefetch_before(kept->number, seen, lock);
  }
  const at::DisableRecordFunctionGuard unseen;
  at::Tensor out = at::empty({0}, saved.options);
  out.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(saved.sizes, saved.strides, saved.offset);
  return out;
}

void ActivationStore::prefetch_before(std::uint64_t number,
                                      std::vector<std::shared_ptr<Kept>>& seen, const Lock& lock) {
  auto at = by_number_.lower_bound(number);
  while (at != by_number_.begin() && ahead_ < options_.in_flight) {
    --at;
    seen.push_back(at->second.lock());
    const std::shared_ptr<Kept>& kept = seen.back();
    if (kept == nullptr || kept->source || kept->back || !kept->used.expired() ||
        kept->error != nullptr) {
      continue;
    }
    if (ahead_ > 0 && ahead_ + kept->bytes > options_.in_flight) return;
    ahead_ += kept->bytes;
    kept->counted_ahead = true;
    start_reading(kept, lock);
  }
}

void ActivationStore::forget(const Kept& kept) noexcept {
  const Lock lock(mutex_);
  if (kept.counted_ahead) ahead_ -= kept.bytes;
  by_number_.erase(kept.number);
  const auto found = by_storage_.find(kept.key);
  if (found != by_storage_.end() && found->second.expired()) by_storage_.erase(found);
}

}  // namespace pagoda::torch

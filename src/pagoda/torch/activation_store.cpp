// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/activation_store.h"

#include <algorithm>
#include <future>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/NamedTensorUtils.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/storage_table.h"

namespace pagoda::torch {

/// One storage, however many tensors of it are saved.
struct ActivationStore::Kept : std::enable_shared_from_this<Kept> {
  enum class State {
    Here,       ///< device memory, as large as the storage; others may refer to it, and write
    Leaving,    ///< the same, while it is copied; nobody else refers to it
    Away,       ///< `home` alone
    Returning,  ///< both: device memory that is being filled, or has been and is not asked for yet
  };

  ~Kept() {
    if (const auto alive = store.lock()) alive->forget(*this);
  }

  std::weak_ptr<ActivationStore> store;
  Policy policy;

  // The rest is guarded by the store's mutex; while it is Leaving or Returning, home, storage and
  // ready belong to the task, too, and do not change.
  State state = State::Here;
  StorageRef storage;      // but for Away
  Bytes bytes = 0;         // of the storage, when it left
  Bytes wanted = 0;        // of the saved tensors, together
  pager::Home home;        // from the first time it leaves
  std::uint64_t turn = 0;  // counts changes of mind: a copy of an older one is not valid
  std::set<std::uint64_t> numbers;
  std::vector<std::shared_ptr<device::Stream>> streams;  // on which it was saved
  std::vector<device::Mark> ready;                       // what a copy is to wait for
  std::shared_future<void> reading;                      // Returning
  bool counted_ahead = false;
  std::optional<c10::Stream> allocated_on;  // once restored, where that is a GPU's
  KeptList* list = nullptr;
  KeptList::iterator place;
};

/// One saved tensor's share in it.
struct ActivationStore::Use {
  ~Use() {
    if (const auto alive = kept->store.lock()) alive->forget(*this);
  }

  std::shared_ptr<Kept> kept;
  std::uint64_t number = 0;  // in the order of pack()
  Bytes bytes = 0;
};

/// The store's lock, and what may only be let go after it: the last reference to a Kept takes the
/// lock itself, and the last one to a storage may take Python's.
struct ActivationStore::Section {
  explicit Section(ActivationStore& store) : lock(mutex_of(store)) {}

  std::vector<std::shared_ptr<Kept>> kept;
  std::vector<StorageRef> storages;
  Bytes newest = 0;                            // of what has begun to leave in here
  RankedLock<LockRank::ActivationStore> lock;  // the last member is the first to go

 private:
  static RankedMutex<LockRank::ActivationStore>& mutex_of(ActivationStore& store) {
    store.owner_.require("an engine");
    return store.mutex_;
  }
};

namespace {

constexpr std::string_view kActivations = "activations";
constexpr Bytes kStaging = 8_MiB;
/// How many storages a pack() or unpack() looks at: what others hold for long is not to slow them.
constexpr std::size_t kLooksAt = 64;
constexpr std::uint64_t kAnyNumber = std::numeric_limits<std::uint64_t>::max();

/// Whether it is no more than strided bytes: no wrapper, subclass with a dispatch of its own, other
/// layout, or quantizer. Conjugate and negative views are; their bits are among the keys.
bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlain({DispatchKey::Dense, DispatchKey::AutogradFunctionality,
                                        DispatchKey::ADInplaceOrView, DispatchKey::Conjugate,
                                        DispatchKey::Negative, DispatchKey::AutocastCPU,
                                        DispatchKey::AutocastCUDA});
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const std::uint64_t others = (impl.key_set() - kPlain).raw_repr() & ~c10::full_backend_mask;
  return others == 0 && !impl.is_python_dispatch() && !impl.has_symbolic_sizes_strides() &&
         impl.layout() == at::kStrided && impl.has_storage() && !tensor.has_names();
}

/// Whether nobody but the storage has its memory. Not so if it belongs to numpy, to another process
/// or to a copy-on-write sibling: they may write to it, and freeing it would free nothing.
bool owns_its_memory(c10::StorageImpl& storage) {
  const c10::Allocator* allocator = storage.allocator();
  return allocator != nullptr && allocator->raw_deleter() != nullptr &&
         storage._mutable_data_ptr_no_checks().get_deleter() == allocator->raw_deleter();
}

/// The bytes that a tensor's elements take: of an expanded one, fewer than it has elements.
Bytes bytes_of(const at::Tensor& tensor) {
  const std::size_t item = tensor.itemsize();
  return std::min<Bytes>(tensor.nbytes(),
                         at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), item));
}

void check_version(const ActivationStore::Saved& saved) {
  if (!saved.version.enabled() || saved.version.current_version() == saved.saved_version) return;
  std::string what;
  if (!saved.tensor.defined()) {
    what = c10::str(c10::toString(c10::typeMetaToScalarType(saved.dtype)), "Tensor ",
                    c10::IntArrayRef(saved.sizes));
  } else if (is_plain(saved.tensor)) {
    what = c10::str(saved.tensor.toString(), " ", saved.tensor.sizes());
  } else {
    what = saved.tensor.toString();
  }
  // Autograd's words.
  TORCH_CHECK(false,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: [",
              what, "] is at version ", saved.version.current_version(), "; expected version ",
              saved.saved_version,
              " instead. Hint: enable anomaly detection to find the operation that failed to "
              "compute its gradient, with torch.autograd.set_detect_anomaly(True).");
}

void warn_of_failed_write(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& cause) {
    log::warn("torch", "activations that cannot be written stay on the device",
              {{"cause", cause.what()}});
  }
}

}  // namespace

ActivationStore::ActivationStore(pager::Tiers& tiers, ThreadPool& pool, c10::Device device,
                                 Consumer consumer)
    : tiers_(tiers), pool_(pool), device_(device), consumer_(std::move(consumer)) {
  if (tiers_.device()->kind() != device::DeviceKind::Host) {
    copies_ = tiers_.device()->make_stream({"activations", 0});
  }
}

bool ActivationStore::can_leave(const at::Tensor& tensor, const Policy& policy) const {
  if (!is_plain(tensor) || tensor.device() != device_) return false;
  // Its gradient's accumulator holds it anyway.
  if (tensor.is_leaf() && tensor.requires_grad()) return false;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  return storage->nbytes() >= std::max<Bytes>(policy.least, 1) &&
         StorageTable::instance().find(storage) == nullptr;
}

/// Whether this thread's operators become part of a CUDA graph.
bool ActivationStore::capturing() const {
  const auto stream = consumer_();
  return stream != nullptr && stream->capturing();
}

ActivationStore::Saved ActivationStore::pack(const at::Tensor& tensor, const Policy& policy) {
  Saved saved;
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  if (!tensor.is_inference() && version.enabled()) {
    saved.version = version;
    saved.saved_version = version.current_version();
  }
  if (!can_leave(tensor, policy) || capturing()) {
    // Not the tensor itself, if it may be the result of what saves it: that would be a cycle.
    saved.tensor = tensor.is_leaf() ? tensor : tensor.tensor_data();
    return saved;
  }
  saved.keys = tensor.key_set();
  saved.dtype = tensor.dtype();
  saved.sizes = tensor.sizes().vec();
  saved.strides = tensor.strides().vec();
  saved.offset = tensor.storage_offset();

  std::shared_ptr<device::Stream> stream = consumer_();

  Section section(*this);
  const std::shared_ptr<Kept> kept = kept_for(tensor, policy, section);
  section.kept.push_back(kept);
  saved.use = std::make_shared<Use>(kept, next_++, bytes_of(tensor));
  by_number_[saved.use->number] = kept.get();
  kept->numbers.insert(saved.use->number);
  kept->wanted += saved.use->bytes;
  auto& streams = kept->streams;
  if (stream != nullptr && std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(std::move(stream));
  }
  sweep_fresh(kLooksAt, kAnyNumber, section);
  sweep_restored(section);
  // Forward is no faster than what it saves can leave.
  wait_until_written(policy.in_flight, section);
  return saved;
}

std::shared_ptr<ActivationStore::Kept> ActivationStore::kept_for(const at::Tensor& tensor,
                                                                 const Policy& policy,
                                                                 Section& section) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto known = by_storage_.find(storage);
  if (known != by_storage_.end()) {
    // One that is just going lets the storage go with it.
    if (auto kept = known->second->weak_from_this().lock()) return kept;
  }
  auto kept = std::make_shared<Kept>();
  kept->store = weak_from_this();
  kept->policy = policy;
  kept->storage = StorageRef::unsafe_reclaim_from_nonowning(storage);
  by_storage_[storage] = kept.get();
  put(*kept, &fresh_, section);
  return kept;
}

void ActivationStore::put(Kept& kept, KeptList* list, Section& /*section*/) {
  if (kept.list == &restored_) restored_bytes_ -= kept.bytes;
  if (kept.list != nullptr) kept.list->erase(kept.place);
  kept.list = list;
  if (list == &restored_) restored_bytes_ += kept.bytes;
  if (list != nullptr) kept.place = list->insert(list->end(), &kept);
}

/// Those saved last below `below` leave, if they may.
void ActivationStore::sweep_fresh(std::size_t at_most, std::uint64_t below, Section& section) {
  for (std::size_t left = std::min(fresh_.size(), at_most); left > 0; --left) {
    Kept& kept = *fresh_.front();
    fresh_.splice(fresh_.end(), fresh_, fresh_.begin());  // its turn comes after the others'
    if (!kept.numbers.empty() && *kept.numbers.rbegin() < below) leave(kept, section);
  }
}

/// What backward has used and may use again leaves if it is more than may be in flight.
void ActivationStore::sweep_restored(Section& section) {
  for (std::size_t left = std::min(restored_.size(), kLooksAt); left > 0; --left) {
    Kept& kept = *restored_.front();
    if (restored_bytes_ <= kept.policy.in_flight) return;
    restored_.splice(restored_.end(), restored_, restored_.begin());
    leave(kept, section);
  }
}

/// Has it copied, if ours is the only reference. Nobody can get another one then: a tensor, view,
/// alias or weak reference would be counted. So the bytes are those that backward is to read.
void ActivationStore::leave(Kept& kept, Section& section) {
  if (!kept.storage.is_uniquely_owned()) return;
  const auto alive = kept.weak_from_this().lock();
  if (alive == nullptr || std::any_of(kept.streams.begin(), kept.streams.end(),
                                      [](const auto& stream) { return stream->capturing(); })) {
    return;
  }
  section.kept.push_back(alive);
  const Bytes bytes = kept.storage->nbytes();
  // A little of something large is not worth its way.
  const bool worth = bytes > 0 && kept.wanted >= bytes / 4 && owns_its_memory(*kept.storage);
  if (!worth || !make_home(kept, bytes)) {
    put(kept, nullptr, section);
    return;
  }
  put(kept, nullptr, section);
  kept.bytes = bytes;
  kept.state = Kept::State::Leaving;
  by_storage_.erase(kept.storage.get());
  kept.ready.clear();
  for (const auto& stream : kept.streams) kept.ready.push_back(stream->mark());
  if (const auto stream = consumer_()) kept.ready.push_back(stream->mark());
  leaving_ += bytes;
  section.newest += bytes;
  auto task = [self = shared_from_this(), alive, turn = kept.turn, bytes] {
    self->write(alive, turn, bytes);
  };
  if (paused_) {
    held_back_.emplace_back(std::move(task));
  } else {
    (void)pool_.submit(std::move(task));
  }
}

/// False: there is no room.
bool ActivationStore::make_home(Kept& kept, Bytes bytes) {
  if (kept.home && kept.home.size() == bytes) return true;
  try {
    kept.home = tiers_.allocate(bytes, kept.policy.placement, kActivations, "saved for backward");
    if (copies_ != nullptr && kept.home.tier() == pager::Tier::Nvme && staging_.data() == nullptr) {
      // Now: when the copy runs, the host may be full.
      staging_ = tiers_.host().allocate(kStaging, pager::tag::kStaging, "saved for backward");
    }
    return true;
  } catch (const UserError& error) {
    kept.home = {};
    if (!std::exchange(told_, true)) {
      log::warn("torch", "activations stay on the device: there is no room for them",
                {{"cause", error.message()}});
    }
    return false;
  }
}

void ActivationStore::wait_until_written(Bytes in_flight, Section& section) {
  const Bytes most = std::max(in_flight, section.newest);
  written_.wait(section.lock, [&] { return paused_ || leaving_ <= most; });
}

void ActivationStore::write(const std::shared_ptr<Kept>& kept, std::uint64_t turn, Bytes bytes) {
  std::exception_ptr error;
  StorageRef storage;
  {
    const Section section(*this);
    // If nobody but this task needs it, the graph is gone. If it has been asked for meanwhile, it
    // is in use again.
    if (kept.use_count() > 1 && kept->turn == turn) storage = kept->storage;
  }
  if (storage) {
    try {
      const auto* data = static_cast<const std::byte*>(storage->data());
      for (const device::Mark& mark : kept->ready) copies_->wait(*mark.event);
      if (copies_ == nullptr) {
        tiers_.write(kept->home, 0, {data, bytes});
      } else if (kept->home.tier() == pager::Tier::Host) {
        copies_->copy_async(kept->home.data(), data, bytes, device::Direction::DeviceToHost,
                            kActivations);
        copies_->synchronize();
      } else {
        through_staging(bytes, [&](Bytes at, std::span<std::byte> staging) {
          copies_->copy_async(staging.data(), data + at, staging.size(),
                              device::Direction::DeviceToHost, kActivations);
          copies_->synchronize();
          tiers_.write(kept->home, at, staging);
        });
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  bool told = false;
  {
    Section section(*this);
    if (error != nullptr) told = std::exchange(told_of_failure_, true);
    leaving_ -= bytes;
    if (storage && kept->turn == turn) {
      ++kept->turn;
      if (error == nullptr) {
        kept->state = Kept::State::Away;
        section.storages.push_back(std::move(kept->storage));
      } else {  // nothing is lost: it stays
        kept->state = Kept::State::Here;
        by_storage_[kept->storage.get()] = kept.get();
      }
    }
  }
  if (error != nullptr && !told) warn_of_failed_write(error);
  storage.reset();
  written_.notify_all();
}

ActivationStore::StorageRef ActivationStore::empty_storage(Bytes bytes) const {
  // Not at::empty(): a dispatch mode of the user's would see it.
  const c10::DeviceGuard guard(device_);
  c10::Allocator* allocator = c10::GetAllocator(device_.type());
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               allocator->allocate(bytes), allocator,
                                               /*resizable=*/true);
}

/// Fills `storage`. The caller's thread is one that runs operators.
void ActivationStore::start_reading(const std::shared_ptr<Kept>& kept, StorageRef storage,
                                    Section& /*section*/) {
  kept->storage = std::move(storage);
  kept->state = Kept::State::Returning;
  kept->ready.clear();
  kept->allocated_on.reset();
  if (const auto stream = consumer_()) {
    kept->ready.push_back(stream->mark());  // its memory is free then
    kept->allocated_on = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }
  kept->reading =
      pool_.submit([self = shared_from_this(), kept] { self->read(*kept); }, Priority::Urgent)
          .share();
}

void ActivationStore::read(Kept& kept) {
  auto* data = static_cast<std::byte*>(kept.storage->mutable_data());
  for (const device::Mark& mark : kept.ready) copies_->wait(*mark.event);
  if (copies_ == nullptr) {
    tiers_.read(kept.home, 0, {data, kept.bytes});
  } else if (kept.home.tier() == pager::Tier::Host) {
    copies_->copy_async(data, kept.home.data(), kept.bytes, device::Direction::HostToDevice,
                        kActivations);
    copies_->synchronize();
  } else {
    through_staging(kept.bytes, [&](Bytes at, std::span<std::byte> staging) {
      tiers_.read(kept.home, at, staging);
      copies_->copy_async(data + at, staging.data(), staging.size(),
                          device::Direction::HostToDevice, kActivations);
      copies_->synchronize();
    });
  }
}

/// On the pool's one thread.
template <class Fn>
void ActivationStore::through_staging(Bytes bytes, Fn&& piece) {
  for (Bytes at = 0; at < bytes; at += kStaging) {
    piece(at, std::span(staging_.data(), std::min(kStaging, bytes - at)));
  }
}

at::Tensor ActivationStore::unpack(const Saved& saved) {
  check_version(saved);
  if (saved.tensor.defined()) return saved.tensor;
  const std::shared_ptr<Kept>& kept = saved.use->kept;
  const Bytes in_flight = kept->policy.in_flight;
  StorageRef storage = bring_back(kept);
  use_on_this_stream(*kept, *storage);
  if (!capturing()) {
    const std::uint64_t far = prefetch_before(saved.use->number, in_flight);
    Section section(*this);
    sweep_fresh(kLooksAt, far, section);
    sweep_restored(section);
    wait_until_written(in_flight, section);
  }
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), saved.keys,
                                                      saved.dtype);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(saved.sizes, saved.strides, saved.offset);
  return out;
}

ActivationStore::StorageRef ActivationStore::bring_back(const std::shared_ptr<Kept>& kept) {
  for (;;) {
    std::shared_future<void> reading;
    Bytes bytes = 0;
    {
      Section section(*this);
      switch (kept->state) {
        case Kept::State::Here:
          return kept->storage;
        case Kept::State::Leaving:  // whoever has it may write to it, so the copy is worth nothing
          ++kept->turn;
          arrive(*kept, section);
          return kept->storage;
        case Kept::State::Returning:
          reading = kept->reading;
          break;
        case Kept::State::Away:
          bytes = kept->bytes;
          break;
      }
    }
    PAGODA_REQUIRE(!capturing(),
                   "a CUDA graph cannot capture a backward whose activations have been offloaded: "
                   "capture the forward, too, or leave engine.activations() out");
    if (!reading.valid()) {
      StorageRef storage = empty_storage(bytes);  // not under the lock: it may need Python's
      Section section(*this);
      if (kept->state == Kept::State::Away) start_reading(kept, std::move(storage), section);
      continue;
    }
    std::exception_ptr error;
    try {
      reading.get();
    } catch (...) {
      error = std::current_exception();
    }
    Section section(*this);
    if (kept->state != Kept::State::Returning) continue;  // another thread was faster
    if (kept->counted_ahead) ahead_ -= kept->bytes;
    kept->counted_ahead = false;
    if (error == nullptr) {
      arrive(*kept, section);
      return kept->storage;
    }
    kept->state = Kept::State::Away;
    section.storages.push_back(std::move(kept->storage));
    std::rethrow_exception(error);
  }
}

void ActivationStore::arrive(Kept& kept, Section& section) {
  kept.state = Kept::State::Here;
  by_storage_[kept.storage.get()] = &kept;
  put(kept, &restored_, section);
}

/// Memory that one stream's operators asked for may be used by another's.
void ActivationStore::use_on_this_stream(const Kept& kept, const c10::StorageImpl& storage) {
  std::optional<c10::Stream> allocated_on;
  {
    const std::lock_guard lock(mutex_);
    allocated_on = kept.allocated_on;
  }
  if (!allocated_on) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const c10::Stream stream = guard.getStream(device_);
  if (stream != *allocated_on) guard.recordDataPtrOnStream(storage.data_ptr(), stream);
}

/// What comes next in backward was saved just before: has `window` bytes of it here, or on their
/// way. Whatever was saved before the returned number is further.
std::uint64_t ActivationStore::prefetch_before(std::uint64_t number, Bytes window) {
  Bytes near = 0;
  for (std::size_t looked = 0; looked < kLooksAt; ++looked) {
    std::shared_ptr<Kept> kept;
    Bytes bytes = 0;
    {
      Section section(*this);
      const auto after = by_number_.lower_bound(number);
      if (after == by_number_.begin()) return 0;
      const auto& [at, candidate] = *std::prev(after);
      kept = candidate->weak_from_this().lock();
      section.kept.push_back(kept);
      bytes =
          candidate->state == Kept::State::Here ? candidate->storage->nbytes() : candidate->bytes;
      if (near > 0 && near + bytes > window) return number;
      number = at;
      near += bytes;
      if (kept == nullptr || kept->state != Kept::State::Away) continue;
      if (ahead_ > 0 && ahead_ + bytes > window) return number + 1;
    }
    StorageRef storage;
    try {
      storage = empty_storage(bytes);
    } catch (const c10::Error&) {  // no memory to be early with
      return number + 1;
    }
    Section section(*this);
    if (kept->state != Kept::State::Away) continue;
    start_reading(kept, std::move(storage), section);
    kept->counted_ahead = true;
    ahead_ += bytes;
  }
  return number;
}

void ActivationStore::sweep() {
  Section section(*this);
  sweep_fresh(fresh_.size(), kAnyNumber, section);
}

void ActivationStore::flush() {
  sweep();
  Section section(*this);
  written_.wait(section.lock, [&] { return paused_ || leaving_ == 0; });
}

void ActivationStore::pause(bool paused) {
  std::vector<std::function<void()>> go;
  {
    const Section section(*this);
    paused_ = paused;
    if (!paused) go.swap(held_back_);
    for (auto& task : go) (void)pool_.submit(task);
  }
  written_.notify_all();
}

void ActivationStore::forget(const Use& use) noexcept {
  if (!owner_.here()) return;
  const Section section(*this);
  use.kept->numbers.erase(use.number);
  use.kept->wanted -= use.bytes;
  by_number_.erase(use.number);
}

void ActivationStore::forget(Kept& kept) noexcept {
  if (!owner_.here()) {
    (void)new pager::Home(std::move(kept.home));  // it would give its bytes back, under locks
    return;
  }
  Section section(*this);
  put(kept, nullptr, section);
  if (kept.counted_ahead) ahead_ -= kept.bytes;
  const auto found = by_storage_.find(kept.storage.get());
  if (found != by_storage_.end() && found->second == &kept) by_storage_.erase(found);
}

}  // namespace pagoda::torch

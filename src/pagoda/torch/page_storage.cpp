// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/page_storage.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include <c10/core/StorageImpl.h>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/torch/storage_table.h"

namespace pagoda::torch {
namespace {

// torch can make a storage throw on access but has no public way back: an explicit instantiation
// may name the private member.
template <bool c10::StorageImpl::*Member>
struct OpenThrowFlag {
  friend bool& throw_flag(c10::StorageImpl& storage) { return storage.*Member; }
};
bool& throw_flag(c10::StorageImpl& storage);
template struct OpenThrowFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// What asks for a pointer to write through looks at this one before it looks at the other.
template <bool c10::StorageImpl::*Member>
struct OpenCheckFlag {
  friend bool& check_flag(c10::StorageImpl& storage) { return storage.*Member; }
};
bool& check_flag(c10::StorageImpl& storage);
template struct OpenCheckFlag<&c10::StorageImpl::has_mutable_data_ptr_check_>;

/// Points nowhere, and keeps the memory until it goes.
c10::DataPtr no_bytes_beside(c10::DataPtr memory, c10::Device device) {
  if (!memory) return {nullptr, device};
  const auto free = [](void* kept) { delete static_cast<c10::DataPtr*>(kept); };
  return {nullptr, new c10::DataPtr(std::move(memory)), free, device};
}

}  // namespace

/// The context of the storage's data pointer. Torch deletes it when the storage dies.
struct PageStorage::Tie {
  Tie(pager::Pager& to, pager::Page& of) : pager(&to), page(&of) {}

  RankedMutex<LockRank::StorageDeath> mutex;
  pager::Pager* pager;  // guarded by mutex; null: it has ended
  pager::Page* page;
  bool dead = false;      // guarded by mutex
  bool orphaned = false;  // guarded by mutex: whose storage is dying frees it
  io::OwnerProcess owner = {};
  std::atomic<bool> told = false;  // from then on the dying storage does not use this

  static void died(void* context) {
    auto* tie = static_cast<Tie*>(context);
    bool orphan = false;
    if (tie->owner.here()) {  // a fork's locks are as they were
      const std::lock_guard lock(tie->mutex);
      if (tie->pager != nullptr) tie->pager->storage_died(*tie->page);
      tie->dead = true;
      orphan = tie->orphaned;
    }
    if (orphan) {
      delete tie;
    } else {
      tie->told.store(true, std::memory_order_release);
    }
  }
};

PageStorage::PageStorage(const c10::Storage& storage, pager::Pager& pager, ObserverClient& client,
                         bool former)
    : pager_(pager),
      client_(client),
      storage_(storage.getWeakStorageImpl()),
      key_(storage.unsafeGetStorageImpl()),
      device_(storage.device()),
      former_(former) {}

PageStorage::~PageStorage() {
  if (tie_ != nullptr) detach(kLost);
}

/// The storage is dying on another thread, which may not have come to died() yet: that needs the
/// tie.
void PageStorage::leave_tie() noexcept {
  Tie* const tie = tie_.release();
  if (!tie->owner.here()) return;
  bool dead = false;
  {
    const std::lock_guard lock(tie->mutex);
    tie->orphaned = true;
    dead = tie->dead;
  }
  if (!dead) return;
  while (!tie->told.load(std::memory_order_acquire)) std::this_thread::yield();
  delete tie;
}

void PageStorage::shut_plain(c10::StorageImpl& storage, const std::string& why) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

void PageStorage::open_plain(c10::StorageImpl& storage) noexcept {
  throw_flag(storage) = false;
}

bool PageStorage::lost(const c10::Storage& storage) noexcept {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  return impl != nullptr && throw_flag(*impl) && StorageTable::instance().find(impl) == nullptr;
}

void PageStorage::watch(pager::Page& page) {
  page_ = &page;
  tie_ = std::make_unique<Tie>(pager_, page);
}

void PageStorage::add_parameter(const at::Tensor& parameter) {
  parameters_.emplace_back(parameter.getIntrusivePtr());
}

bool PageStorage::has_views() const noexcept {
  if (parameters_.empty()) return storage_.use_count() > 1;
  // A parameter that has died shares it no more. Looked at, and not held: the last reference to one
  // may not be dropped here.
  const auto alive = std::count_if(parameters_.begin(), parameters_.end(),
                                   [](const auto& one) { return !one.expired(); });
  return storage_.use_count() > static_cast<std::size_t>(alive);
}

void PageStorage::end() noexcept {
  if (tie_ == nullptr || !tie_->owner.here()) return;
  const std::lock_guard lock(tie_->mutex);
  tie_->pager = nullptr;
}

bool PageStorage::replaced() const noexcept {
  const auto storage = storage_.lock();
  return tie_ != nullptr && storage != nullptr &&
         storage->_mutable_data_ptr_no_checks().get_deleter() != &Tie::died;
}

bool PageStorage::gone() const noexcept {
  return tie_ == nullptr ? !alive() : tie_->told.load(std::memory_order_acquire);
}

/// Points the storage at `data`. What it pointed at before is freed, unless that was ours.
void PageStorage::set(std::byte* data, bool tied) noexcept {
  const auto storage = storage_.lock();
  if (storage == nullptr) return;
  c10::DataPtr& now = storage->_mutable_data_ptr_no_checks();
  if (now.get_deleter() == &Tie::died) (void)now.release_context();
  storage->set_data_ptr_noswap(tied ? c10::DataPtr(data, tie_.get(), &Tie::died, device_)
                                    : c10::DataPtr(data, device_));
}

void PageStorage::bind(std::byte* data) noexcept {
  const auto storage = storage_.lock();
  if (storage == nullptr) return;
  throw_flag(*storage) = false;
  set(data, true);
}

void PageStorage::unbind(const std::string& why) noexcept {
  const auto storage = storage_.lock();
  if (storage == nullptr) return;
  shut();  // first: whoever asks meanwhile gets an error, not a null pointer
  set(nullptr, tie_ != nullptr);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

// Every operator does both. The weak reference keeps the object itself, dead or alive.
void PageStorage::shut() noexcept {
  check_flag(*key_) = true;
  throw_flag(*key_) = true;
}

void PageStorage::open() noexcept {
  throw_flag(*key_) = false;
}

void PageStorage::forget() noexcept {
  shut();
  set(nullptr, tie_ != nullptr);
}

void PageStorage::detach(const std::string& why) {
  end();  // the page may be another storage's when this one's death is told
  unbind(why);
  if (const auto storage = storage_.lock()) {
    (void)storage->_mutable_data_ptr_no_checks().release_context();
    if (kept_) storage->set_data_ptr_noswap(no_bytes_beside(std::move(kept_), device_));
    tie_.reset();
  } else if (tie_ != nullptr) {
    leave_tie();
  }
}

void PageStorage::give_back(c10::DataPtr data) {
  end();
  const auto storage = storage_.lock();
  if (storage == nullptr) return;
  c10::DataPtr& now = storage->_mutable_data_ptr_no_checks();
  if (now.get_deleter() == &Tie::died) (void)now.release_context();
  storage->set_data_ptr_noswap(data ? std::move(data) : std::move(kept_));
  // Operators of other threads ask it without anybody's leave: until here it throws.
  std::atomic_ref(throw_flag(*storage)).store(false, std::memory_order_release);
  tie_.reset();
}

}  // namespace pagoda::torch

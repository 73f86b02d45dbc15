// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/page_storage.h"

#include <atomic>
#include <mutex>
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

}  // namespace

/// The context of the storage's data pointer. Torch deletes it when the storage dies.
struct PageStorage::Tie {
  Tie(pager::Pager& to, pager::Page& of) : pager(&to), page(&of) {}

  RankedMutex<LockRank::StorageDeath> mutex;
  pager::Pager* pager;  // guarded by mutex; null: it has ended
  pager::Page* page;
  io::OwnerProcess owner = {};
  std::atomic<bool> told = false;  // from then on nobody uses this

  static void died(void* context) {
    auto* tie = static_cast<Tie*>(context);
    if (tie->owner.here()) {  // a fork's locks are as they were
      const std::lock_guard lock(tie->mutex);
      if (tie->pager != nullptr) tie->pager->storage_died(*tie->page);
    }
    tie->told.store(true, std::memory_order_release);
  }
};

PageStorage::PageStorage(const c10::Storage& storage, pager::Pager& pager, ObserverClient& client)
    : pager_(pager),
      client_(client),
      storage_(storage.getWeakStorageImpl()),
      key_(storage.unsafeGetStorageImpl()),
      device_(storage.device()) {}

PageStorage::~PageStorage() {
  if (tie_ == nullptr) return;
  end();
  const auto storage = storage_.lock();
  if (storage == nullptr) {
    // It is dying on another thread, which may not have come to died() yet: that needs the tie.
    if (!gone()) (void)tie_.release();
    return;
  }
  (void)storage->_mutable_data_ptr_no_checks().release_context();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this parameter's page went with its engine; engine.release() gives plain tensors back");
}

bool PageStorage::lost(const c10::Storage& storage) noexcept {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  return impl != nullptr && throw_flag(*impl) && StorageTable::instance().find(impl) == nullptr;
}

void PageStorage::watch(pager::Page& page) {
  page_ = &page;
  tie_ = std::make_unique<Tie>(pager_, page);
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

void PageStorage::detach() {
  unbind(
      "this storage was a parameter's, which has another one now (.data =, set_), and its values "
      "were not kept: keep a copy (p.data.clone())");
  if (const auto storage = storage_.lock()) {
    (void)storage->_mutable_data_ptr_no_checks().release_context();
  } else if (!gone()) {
    (void)tie_.release();  // it is dying on another thread, as in the destructor
  }
  tie_.reset();
}

void PageStorage::give_back(c10::DataPtr data) {
  const auto storage = storage_.lock();
  if (storage == nullptr) return;
  c10::DataPtr& now = storage->_mutable_data_ptr_no_checks();
  if (now.get_deleter() == &Tie::died) (void)now.release_context();
  storage->set_data_ptr_noswap(std::move(data));
  // Operators of other threads ask it without anybody's leave: until here it throws.
  std::atomic_ref(throw_flag(*storage)).store(false, std::memory_order_release);
  tie_.reset();
}

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "pagoda/pager/page.h"
#include "pagoda/pager/pager.h"

namespace pagoda::torch {

class ObserverClient;

/// A torch storage whose bytes are a page: pointed at them while they are on the device, throwing
/// on every access while they are not. Views and tensors saved for backward share the storage, so
/// they all follow.
///
/// Called by the pager, under its lock. When the storage dies, wherever that is, the pager is told.
class PageStorage final : public pager::Binding {
 public:
  /// `former`: a parameter had the storage before it was given another one. Its page is nobody's
  /// parameter.
  PageStorage(const c10::Storage& storage, pager::Pager& pager, ObserverClient& client,
              bool former);
  /// The storage, if it still lives and is a page, throws kLost from now on.
  ~PageStorage() override;

  /// After the page exists: from now on the storage's death is the page's.
  void watch(pager::Page& page);
  void bind(std::byte* data) noexcept override;
  void unbind(const std::string& why) noexcept override;
  void shut() noexcept override;
  void open() noexcept override;
  void forget() noexcept override;
  bool has_views() const noexcept override;
  /// One of the parameters that share it: whoever else does has a view.
  void add_parameter(const at::Tensor& parameter);
  bool former() const noexcept { return former_; }
  /// The pager ends: nobody hears of the storage's death, from whichever thread it comes.
  void end() noexcept;
  /// The storage is a page no more and throws `why`; its death means nothing. It keeps the memory
  /// that keep_memory() was given, for as long as it lives.
  void detach(const std::string& why);
  /// The storage becomes a plain one that owns `data`, and is no page any more. Null: that owns its
  /// kept memory.
  void give_back(c10::DataPtr data);
  /// What a plain storage had before it became a page: raw pointers to it may be in use (numpy()),
  /// so it goes with the storage, or when nobody else refers to that. Nothing writes to it.
  ///
  /// One thread at a time: under the lock of those who exchange storages, or while nobody may.
  void keep_memory(c10::DataPtr memory) noexcept { kept_ = std::move(memory); }
  void* kept_memory() const noexcept { return kept_.get(); }
  c10::DataPtr take_kept_memory() noexcept { return std::exchange(kept_, c10::DataPtr()); }

  /// What a storage throws whose page went with its engine.
  static constexpr const char* kLost =
      "this parameter's page went with its engine; engine.release() gives plain tensors back";
  /// A storage that is no page throws `why`, until it is open again. It keeps its memory.
  static void shut_plain(c10::StorageImpl& storage, const std::string& why);
  static void open_plain(c10::StorageImpl& storage) noexcept;
  /// Whether the storage was a page whose engine is gone, so that every access to it throws.
  static bool lost(const c10::Storage& storage) noexcept;

  c10::StorageImpl* key() const noexcept { return key_; }
  bool alive() const noexcept { return !storage_.expired(); }
  /// The storage, kept alive; null if it has died.
  c10::intrusive_ptr<c10::StorageImpl> lock() const noexcept { return storage_.lock(); }
  /// Whether somebody has put other memory into the storage than bind() and unbind() did.
  bool replaced() const noexcept;
  /// The storage is gone, and the pager has been told.
  bool gone() const noexcept;
  pager::Page* page() const noexcept { return page_; }
  pager::Pager& pager() const noexcept { return pager_; }
  ObserverClient& client() const noexcept { return client_; }

 private:
  struct Tie;

  void set(std::byte* data, bool tied) noexcept;
  void leave_tie() noexcept;

  pager::Pager& pager_;
  ObserverClient& client_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // weak: keeps the address from being reused
  c10::StorageImpl* const key_;
  const c10::Device device_;
  pager::Page* page_ = nullptr;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters_;
  const bool former_;
  std::unique_ptr<Tie> tie_;
  c10::DataPtr kept_;
};

}  // namespace pagoda::torch

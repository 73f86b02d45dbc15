// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
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
  PageStorage(const c10::Storage& storage, pager::Pager& pager, ObserverClient& client);
  /// The storage, if it still lives, throws from now on: give it its own bytes first if it shall
  /// not.
  ~PageStorage() override;

  /// After the page exists: from now on the storage's death is the page's.
  void watch(pager::Page& page);
  void bind(std::byte* data) noexcept override;
  void unbind(const std::string& why) noexcept override;
  void shut() noexcept override;
  void open() noexcept override;
  void forget() noexcept override;
  bool has_views() const noexcept override { return storage_.use_count() > parameters_; }
  /// So many parameters share it: others that do are views.
  void set_parameters(std::size_t count) noexcept { parameters_ = count; }
  /// A parameter had it before it was given another one: its page is nobody's parameter.
  void set_former() noexcept { former_ = true; }
  bool former() const noexcept { return former_; }
  /// The pager ends: nobody hears of the storage's death, from whichever thread it comes.
  void end() noexcept;
  /// The storage is a page no more, and its death means nothing; until this goes, as it was.
  void detach();
  /// The storage becomes a plain one that owns `data`, and is no page any more.
  void give_back(c10::DataPtr data);

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

  pager::Pager& pager_;
  ObserverClient& client_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // weak: keeps the address from being reused
  c10::StorageImpl* const key_;
  const c10::Device device_;
  pager::Page* page_ = nullptr;
  std::size_t parameters_ = 1;
  bool former_ = false;
  std::unique_ptr<Tie> tie_;
};

}  // namespace pagoda::torch

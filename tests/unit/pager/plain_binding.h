// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <string>

#include "pagoda/pager/pager.h"

namespace pagoda::pager {

/// Where a page is, as the storage of a tensor would know it.
class PlainBinding final : public Binding {
 public:
  void bind(std::byte* data) noexcept override {
    data_.store(data);
    shut_.store(false);
  }
  void unbind(const std::string& why) noexcept override {
    data_.store(nullptr);
    why_ = why;
  }
  void shut() noexcept override { shut_.store(true); }
  void open() noexcept override { shut_.store(false); }
  void forget() noexcept override { data_.store(nullptr); }
  /// Null: an access throws why().
  std::byte* data() const noexcept { return shut_.load() ? nullptr : data_.load(); }
  const std::string& why() const noexcept { return why_; }

 private:
  std::atomic<std::byte*> data_{nullptr};
  std::atomic<bool> shut_{false};
  std::string why_;  // guarded by the pager's lock
};

}  // namespace pagoda::pager

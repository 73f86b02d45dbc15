// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace pagoda::pager {

/// The other side of a page: whoever must learn where its bytes are now (torch's storages). Called
/// under the pager's lock, from the thread that touches or evicts; must not call the pager.
class Binding {
 public:
  virtual ~Binding() = default;
  /// The page is at `data` until unbind().
  virtual void bind(std::byte* data) noexcept = 0;
  /// The page is absent: an access shall throw `why`.
  virtual void unbind(const std::string& why) noexcept = 0;
  /// It stays where it is, but an access shall throw what the last unbind() said, until open().
  virtual void shut() noexcept = 0;
  virtual void open() noexcept = 0;
  /// The page is absent: an access shall throw what the last unbind() said.
  virtual void forget() noexcept = 0;
  /// Whether others than the parameters themselves share the bytes: a view that user code keeps may
  /// be read without anybody being told.
  virtual bool has_views() const noexcept { return false; }
};

}  // namespace pagoda::pager

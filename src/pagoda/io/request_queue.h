// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>

#include "pagoda/io/request.h"

namespace pagoda::io {

/// What waits for room in an engine: by priority, first in first out within one. Not thread-safe.
class RequestQueue {
 public:
  bool empty() const noexcept { return size_ == 0; }
  std::size_t size() const noexcept { return size_; }

  void push(Request& request) noexcept {
    lists_[static_cast<std::size_t>(request.priority)].push(request);
    ++size_;
  }

  /// Takes all of `list`, in order.
  void splice(RequestList& list) noexcept {
    while (Request* request = list.pop()) push(*request);
  }

  /// The next one to start, or null.
  Request* pop() noexcept {
    for (RequestList& list : lists_) {
      if (Request* request = list.pop()) {
        --size_;
        return request;
      }
    }
    return nullptr;
  }

 private:
  std::array<RequestList, 3> lists_;  // one per Priority
  std::size_t size_ = 0;
};

}  // namespace pagoda::io

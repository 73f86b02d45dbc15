// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>

#include "pagoda/io/request.h"

namespace pagoda::io {

/// What waits for room in an engine: by priority; within one, reads and writes in turns, first in
/// first out each. A disk that has both before it moves more bytes than with either alone, and what
/// is submitted at once is mostly of one kind. Not thread-safe.
class RequestQueue {
 public:
  bool empty() const noexcept { return size_ == 0; }
  std::size_t size() const noexcept { return size_; }

  void push(Request& request) noexcept {
    Lists& lists = lists_[static_cast<std::size_t>(request.priority)];
    (request.op == Op::Write ? lists.writes : lists.others).push(request);
    ++size_;
  }

  /// Takes all of `list`, in order.
  void splice(RequestList& list) noexcept {
    while (Request* request = list.pop()) push(*request);
  }

  /// The next one to start, or null.
  Request* pop() noexcept {
    for (Lists& lists : lists_) {
      const bool write = lists.others.empty() || (!lists.wrote_last && !lists.writes.empty());
      if (Request* request = (write ? lists.writes : lists.others).pop()) {
        lists.wrote_last = write;
        --size_;
        return request;
      }
    }
    return nullptr;
  }

 private:
  struct Lists {
    RequestList writes;
    RequestList others;
    bool wrote_last = true;  // a read is waited for: it comes first
  };

  std::array<Lists, 3> lists_;  // one per Priority
  std::size_t size_ = 0;
};

}  // namespace pagoda::io

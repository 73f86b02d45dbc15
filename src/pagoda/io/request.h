// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagoda/base/bytes.h"
#include "pagoda/base/thread_pool.h"

namespace pagoda::io {

enum class Op : std::uint8_t {
  Read,
  Write,
  Nothing,  ///< moves no bytes: complete(0) is called on a thread of the engine
};

constexpr const char* op_name(Op op) noexcept {
  return op == Op::Read ? "read" : op == Op::Write ? "write" : "nothing";
}

/// One contiguous transfer between memory and a file, as an Engine carries it out.
///
/// Its owner keeps it and its memory alive and unchanged from submit() until complete() is called,
/// and may submit it again from there.
class Request {
 public:
  Op op = Op::Read;
  Priority priority = Priority::Normal;
  unsigned file = 0;  ///< index into the engine's files
  std::byte* data = nullptr;
  Bytes offset = 0;
  Bytes length = 0;

  /// The kernel's answer: bytes moved, possibly fewer than asked, or a negative errno. Called
  /// exactly once per submission, on a thread of the engine.
  virtual void complete(std::int64_t result) noexcept = 0;

 protected:
  Request() = default;
  Request(const Request&) = default;
  Request& operator=(const Request&) = default;
  ~Request() = default;

 private:
  friend class RequestList;
  Request* next_ = nullptr;  // in the list that holds it
};

/// A first-in first-out chain through the requests themselves: adding to it cannot fail. Not
/// thread-safe; a request is in one list at a time.
class RequestList {
 public:
  bool empty() const noexcept { return head_ == nullptr; }
  /// The one pop() would give; it stays.
  Request* first() const noexcept { return head_; }

  void push(Request& request) noexcept {
    request.next_ = nullptr;
    (head_ == nullptr ? head_ : tail_->next_) = &request;
    tail_ = &request;
  }

  /// The first, or null.
  Request* pop() noexcept {
    Request* first = head_;
    if (first != nullptr) head_ = first->next_;
    return first;
  }

 private:
  Request* head_ = nullptr;
  Request* tail_ = nullptr;  // meaningless when empty
};

}  // namespace pagoda::io

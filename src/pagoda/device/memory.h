// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "pagoda/base/bytes.h"

namespace pagoda {
class ThreadPool;
}

namespace pagoda::device {

class OrderingChecker;

/// Where memory lies, as a copy sees it.
enum class MemoryKind {
  Device,  ///< the accelerator's own; the host may not touch it
  Pinned,  ///< the host's, page-locked where the device can reach it directly
};

/// "device" or "pinned".
const char* name(MemoryKind kind);

/// How memory is brought up.
struct MemoryOptions {
  /// Shown in errors and by the ordering checker.
  std::string name = "memory";
  /// Touches pinned pages in parallel; null: a pool of its own for as long as it takes.
  ThreadPool* touchers = nullptr;
};

/// One allocation of a device, given back when it goes.
///
/// Made by Device::allocate(); an Arena cuts it into blocks. Data and size never change and may be
/// read from any thread. Whoever destroys it has waited for all work that uses it.
class Memory {
 public:
  /// `owner` frees the bytes when it is destroyed.
  Memory(MemoryKind kind, std::byte* data, Bytes size, std::shared_ptr<void> owner)
      : kind_(kind), data_(data), size_(size), owner_(std::move(owner)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  MemoryKind kind() const noexcept { return kind_; }
  std::byte* data() const noexcept { return data_; }
  Bytes size() const noexcept { return size_; }

 private:
  friend class Device;

  MemoryKind kind_;
  std::byte* data_;
  Bytes size_;
  std::shared_ptr<void> owner_;
  std::shared_ptr<OrderingChecker> checker_;  // set by Device once it knows these bytes
};

}  // namespace pagoda::device

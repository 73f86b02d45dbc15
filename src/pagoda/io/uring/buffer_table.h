// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <liburing.h>

namespace pagoda::io {

/// The memory registered with one ring, and under which index. Used by the ring's thread only.
///
/// A region longer than the kernel takes at once (1 GiB) is kept in several slots; a transfer that
/// crosses from one into the next is done unregistered.
class BufferTable {
 public:
  /// Asks the ring for a table; without one every add() is refused.
  explicit BufferTable(io_uring& ring);

  /// Zero, or the errno with nothing registered.
  int add(std::span<std::byte> memory);
  void remove(std::span<std::byte> memory) noexcept;

  /// The slot that holds all of [data, data + length), or -1.
  int find(const std::byte* data, std::size_t length) const noexcept;

 private:
  struct Slot {
    std::byte* begin = nullptr;  // null: free
    std::size_t length = 0;
    std::size_t region_length = 0;  // of the memory given to add(), of which this is a part
  };

  int set(std::size_t index, std::span<std::byte> memory) noexcept;

  io_uring& ring_;
  int refused_;              // errno of the table itself; 0 when there is one
  std::vector<Slot> slots_;  // index = the kernel's; grows to the most ever used
};

}  // namespace pagoda::io

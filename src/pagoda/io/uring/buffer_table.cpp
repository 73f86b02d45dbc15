// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/uring/buffer_table.h"

#include <algorithm>
#include <cerrno>

namespace pagoda::io {
namespace {

constexpr std::size_t kSlots = 512;
constexpr std::size_t kLongest = std::size_t{1} << 30;  // the kernel's limit for one buffer

}  // namespace

BufferTable::BufferTable(io_uring& ring)
    : ring_(ring), refused_(-io_uring_register_buffers_sparse(&ring, kSlots)) {}

int BufferTable::add(std::span<std::byte> memory) {
  if (refused_ != 0) return refused_;
  std::size_t next = 0;
  for (std::size_t done = 0; done < memory.size(); done += kLongest) {
    while (next < slots_.size() && slots_[next].begin != nullptr) ++next;
    const auto part = memory.subspan(done, std::min(kLongest, memory.size() - done));
    if (next == slots_.size() && next < kSlots) slots_.emplace_back();
    const int error = next < slots_.size() ? set(next, part) : ENOBUFS;
    if (error != 0) {
      remove(memory);
      return error;
    }
    slots_[next] = {part.data(), part.size(), memory.size()};
  }
  return 0;
}

void BufferTable::remove(std::span<std::byte> memory) noexcept {
  for (std::size_t done = 0; done < memory.size(); done += kLongest) {
    // One slot a part: the same memory may have been added twice.
    const auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& candidate) {
      return candidate.begin == memory.data() + done && candidate.region_length == memory.size();
    });
    if (slot == slots_.end()) return;
    set(static_cast<std::size_t>(slot - slots_.begin()), {});
    *slot = {};
  }
}

int BufferTable::find(const std::byte* data, std::size_t length) const noexcept {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.begin != nullptr && data >= slot.begin && data + length <= slot.begin + slot.length) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int BufferTable::set(std::size_t index, std::span<std::byte> memory) noexcept {
  const iovec range{memory.data(), memory.size()};
  const int result = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index),
                                                          &range, nullptr, 1);
  return result < 0 ? -result : 0;
}

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pagoda::comm {

/// Names a message between two ranks. Callers' tags lie below kTags; the rest is the group's own.
using Tag = std::uint32_t;
inline constexpr Tag kTags = Tag{1} << 30;

/// One message to or from one peer, for Group::exchange(). Made by send_to() and receive_from().
struct Transfer {
  int peer = -1;
  Tag tag = 0;
  std::span<const std::byte> out;  ///< what to send, if this sends
  std::span<std::byte> in;         ///< where to receive, if this receives

  bool sends() const noexcept { return !out.empty(); }
  std::size_t bytes() const noexcept { return sends() ? out.size() : in.size(); }
};

inline Transfer send_to(int peer, Tag tag, std::span<const std::byte> data) noexcept {
  return {.peer = peer, .tag = tag, .out = data, .in = {}};
}

inline Transfer receive_from(int peer, Tag tag, std::span<std::byte> data) noexcept {
  return {.peer = peer, .tag = tag, .out = {}, .in = data};
}

}  // namespace pagoda::comm

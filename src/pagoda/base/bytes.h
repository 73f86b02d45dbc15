// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pagoda {

/// A number of bytes, wherever they lie.
using Bytes = std::uint64_t;

/// Reads a byte size as people write it: "8GiB", "512M", "1.5 GB", "4096".
///
/// A bare letter and the `iB` form are powers of 1024 (512M = 512MiB), the `B` form powers of 1000
/// (512MB), as in GNU coreutils; K, M, G, T and P, in either case. A fraction is rounded down to a
/// whole byte. Anything else (a sign, an unknown unit, an empty text, more than 2⁶⁴−1 bytes) is a
/// UserError that repeats the text.
Bytes parse_bytes(std::string_view text);

/// Prints a byte size for people: "0 B", "512 MiB", "1.50 GiB". Parsing a size printed without a
/// fraction gives it back exactly; with one, two decimals of the largest fitting unit are shown.
std::string format_bytes(Bytes bytes);

/// The same for "at least" in a message: what it prints is never less than `bytes`.
std::string format_bytes_up(Bytes bytes);

/// Smallest multiple of `alignment`, a power of two, that is not below `value`.
constexpr Bytes align_up(Bytes value, Bytes alignment) noexcept {
  return (value + alignment - 1) & ~(alignment - 1);
}

/// Largest multiple of `alignment`, a power of two, that is not above `value`.
constexpr Bytes align_down(Bytes value, Bytes alignment) noexcept {
  return value & ~(alignment - 1);
}

constexpr bool is_power_of_two(Bytes value) noexcept {
  return value != 0 && (value & (value - 1)) == 0;
}

inline namespace literals {
constexpr Bytes operator""_KiB(unsigned long long n) {
  return n << 10;
}
constexpr Bytes operator""_MiB(unsigned long long n) {
  return n << 20;
}
constexpr Bytes operator""_GiB(unsigned long long n) {
  return n << 30;
}
}  // namespace literals

}  // namespace pagoda

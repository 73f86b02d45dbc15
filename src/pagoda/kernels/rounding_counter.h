// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace pagoda::kernels {

/// The two words that stand for (seed, step, upper half of the index) in the generator of
/// stochastic rounding. See "Stochastic rounding" in docs/notes/numerics.md.
struct RoundingKey {
  std::uint32_t first = 0;
  std::uint32_t second = 0;
};

/// SplitMix64's output function: every bit of the input reaches every bit of the output.
constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

constexpr RoundingKey rounding_key(std::uint64_t seed, std::uint64_t step,
                                   std::uint32_t index_high) noexcept {
  const std::uint64_t key = mix64(mix64(mix64(seed) ^ step) ^ index_high);
  return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

/// The random word of one element: the lower half rounds its first moment, the upper its second.
/// The vector form in simd/lanes-inl.h computes the same.
constexpr std::uint32_t rounding_bits(RoundingKey key, std::uint32_t index_low) noexcept {
  std::uint32_t x = index_low ^ key.first;
  x = (x ^ (x >> 16)) * 0x7FEB352DU + key.second;
  x = (x ^ (x >> 15)) * 0x846CA68BU;
  return x ^ (x >> 16);
}

}  // namespace pagoda::kernels

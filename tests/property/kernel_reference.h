// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

/// docs/notes/numerics.md once more, one element at a time, as plainly as it can be said. Shares no
/// code with src/pagoda/kernels.
namespace pagoda::reference {

constexpr std::uint32_t kOneNan = 0x7FC00000;

inline std::uint32_t bits(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
inline float value(std::uint32_t x) {
  return std::bit_cast<float>(x);
}
inline bool is_nan(std::uint32_t x) {
  return (x & 0x7FFFFFFF) > 0x7F800000;
}

/// The nearer of the two neighbours, the even one of a tie, in the order of the bit patterns.
inline std::uint16_t to_bf16(std::uint32_t x) {
  if (is_nan(x)) return static_cast<std::uint16_t>((x >> 16) | 0x40);
  const std::uint32_t below = x & 0xFFFF0000;
  const std::uint32_t above = below + 0x10000;
  const std::uint32_t down = x - below;
  const std::uint32_t up = above - x;
  const bool take_above = up < down || (up == down && ((above >> 16) & 1) == 0);
  return static_cast<std::uint16_t>((take_above ? above : below) >> 16);
}

inline std::uint32_t from_bf16(std::uint16_t x) {
  return std::uint32_t{x} << 16;
}

/// By way of doubles: a multiple of the spacing of fp16 at that size.
inline std::uint16_t to_fp16(std::uint32_t x) {
  const auto sign = static_cast<std::uint16_t>((x >> 16) & 0x8000);
  if (is_nan(x)) return static_cast<std::uint16_t>(sign | 0x7E00 | ((x >> 13) & 0x3FF));
  const double size = std::fabs(static_cast<double>(value(x)));
  if (size >= 65520) return sign | 0x7C00;
  int exponent = 0;
  std::frexp(size, &exponent);
  if (size == 0 || exponent < -13) exponent = -13;  // denormal: the spacing of 2⁻¹⁴
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  // Adding the units to the exponent's field lets a carry, and the hidden bit, move up by itself.
  const auto field = static_cast<std::uint32_t>(exponent + 13) << 10;
  return static_cast<std::uint16_t>(sign | (field + units));
}

inline std::uint32_t from_fp16(std::uint16_t x) {
  const std::uint32_t sign = std::uint32_t{x & 0x8000U} << 16;
  const int exponent = (x >> 10) & 31;
  const std::uint32_t payload = x & 0x3FFU;
  if (exponent == 31) {
    return sign | 0x7F800000 | (payload << 13) | (payload != 0 ? 0x00400000U : 0U);
  }
  const double size =
      exponent == 0 ? std::ldexp(payload, -24) : std::ldexp(1024.0 + payload, exponent - 25);
  return sign | bits(static_cast<float>(size));
}

inline std::uint32_t random_word(std::uint64_t seed, std::uint64_t step, std::uint64_t index) {
  const auto mix = [](std::uint64_t z) {
    z += 0x9E3779B97F4A7C15;
    z ^= z >> 30;
    z *= 0xBF58476D1CE4E5B9;
    z ^= z >> 27;
    z *= 0x94D049BB133111EB;
    return z ^ (z >> 31);
  };
  const std::uint64_t key = mix(mix(mix(seed) ^ step) ^ (index >> 32));
  auto x = static_cast<std::uint32_t>(index) ^ static_cast<std::uint32_t>(key);
  x ^= x >> 16;
  x *= 0x7FEB352D;
  x += static_cast<std::uint32_t>(key >> 32);
  x ^= x >> 15;
  x *= 0x846CA68B;
  return x ^ (x >> 16);
}

inline std::uint16_t round_stochastically(float x, std::uint32_t noise) {
  return static_cast<std::uint16_t>((bits(x) + noise) >> 16);
}

/// What arithmetic leaves behind: one NaN.
inline float settled(float x) {
  return x == x ? x : value(kOneNan);
}
/// What is left of a first moment: one NaN, no denormals.
inline float settled_moment(float x) {
  if (x != x) return value(kOneNan);
  return std::fabs(x) < std::numeric_limits<float>::min() ? 0.0F : x;
}

struct Scalars {
  float lr = 0, grad_scale = 1, l2 = 0, keep = 1, beta1 = 0, rest1 = 0, beta2 = 0, rest2 = 0;
  float step_size = 0, unbias2 = 0, eps = 0, lookahead = 0;
  bool has_l2 = false, nesterov = false;
};

inline void adam(const Scalars& s, float g, float& p, float& m, float& v) {
  g = g * s.grad_scale;
  if (s.has_l2) g = g + s.l2 * p;
  p = p * s.keep;
  m = settled_moment(s.beta1 * m + s.rest1 * g);
  v = settled(s.beta2 * v + s.rest2 * (g * g));
  const float divisor = std::sqrt(v) * s.unbias2 + s.eps;
  p = settled(p - (s.step_size * m) / divisor);
}

inline void lion(const Scalars& s, float g, float& p, float& m) {
  g = g * s.grad_scale;
  p = p * s.keep;
  const float direction = s.beta1 * m + s.rest1 * g;
  const float change = direction > 0 ? s.lr : direction < 0 ? -s.lr : direction;
  p = settled(p - change);
  m = settled_moment(s.beta2 * m + s.rest2 * g);
}

/// beta1 multiplies the buffer, rest1 the gradient.
inline void sgd(const Scalars& s, bool has_momentum, float g, float& p, float& m) {
  g = g * s.grad_scale;
  if (s.has_l2) g = g + s.l2 * p;
  p = p * s.keep;
  float change = g;
  if (has_momentum) {
    m = settled_moment(s.beta1 * m + s.rest1 * g);
    change = s.nesterov ? g + s.lookahead * m : m;
  }
  p = settled(p - s.lr * change);
}

}  // namespace pagoda::reference

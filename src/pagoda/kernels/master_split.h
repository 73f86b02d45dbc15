// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagoda/kernels/element.h"
#include "pagoda/kernels/isa.h"

namespace pagoda::kernels {

/// An fp32 master kept as the bf16 parameter that it rounds to, a signed 16-bit rest and one bit.
///
/// Exact for all 2³² patterns, NaN included: see "Split master" in docs/notes/numerics.md. The bit
/// lives in the sign of the second moment, which is never negative.
struct SplitMaster {
  Bf16 param;
  std::int16_t rest;
  bool tie;  ///< the master lies below a tie, or is a signalling NaN
};

constexpr SplitMaster split_master(std::uint32_t master_bits) noexcept {
  const auto high = static_cast<std::uint16_t>(master_bits >> 16);
  const auto low = static_cast<std::uint16_t>(master_bits);
  const auto rest = static_cast<std::int16_t>(low);
  if ((master_bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return {{static_cast<std::uint16_t>(high | 0x0040U)}, rest, (high & 0x0040U) == 0};
  }
  const bool up = low > 0x8000U || (low == 0x8000U && (high & 1U) != 0);
  return {{static_cast<std::uint16_t>(high + (up ? 1U : 0U))}, rest, up && low == 0x8000U};
}

/// The bits of the master. join_master(split_master(x)) == x for every x.
constexpr std::uint32_t join_master(const SplitMaster& split) noexcept {
  const auto low = static_cast<std::uint16_t>(split.rest);
  const std::uint32_t joined = (std::uint32_t{split.param.bits} << 16) | low;
  if ((split.param.bits & 0x7FFFU) > 0x7F80U) return split.tie ? joined & ~0x00400000U : joined;
  const bool up = low > 0x8000U || (low == 0x8000U && split.tie);
  return joined - (up ? 0x10000U : 0U);
}

/// Splits `count` masters. `variance` (fp32 or bf16, not negative) gets the bits as its signs.
/// May be called from any thread; arrays do not overlap.
void split_masters(const float* master, Bf16* param, std::int16_t* rest, Elements variance,
                   std::size_t count, Isa isa = active_isa());

/// The reverse; `variance` keeps its signs (it goes on as the state of a split master).
void join_masters(const Bf16* param, const std::int16_t* rest, ConstElements variance,
                  float* master, std::size_t count, Isa isa = active_isa());

}  // namespace pagoda::kernels

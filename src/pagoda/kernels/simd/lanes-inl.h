// SPDX-License-Identifier: Apache-2.0
// Vectors of fp32 and how they are stored: loads, stores, casts, the split master and stochastic
// rounding. Included once per target, after hwy/foreach_target.h. The rules are those of
// docs/notes/numerics.md; nothing here may use MulAdd or an approximation.
#if defined(PAGODA_KERNELS_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGODA_KERNELS_LANES_INL_H
#undef PAGODA_KERNELS_LANES_INL_H
#else
#define PAGODA_KERNELS_LANES_INL_H
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include "pagoda/kernels/element.h"
#include "pagoda/kernels/rounding_counter.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using D16 = hn::Rebind<std::uint16_t, DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using V16 = hn::Vec<D16>;

constexpr DF kF{};
constexpr DU kU{};
constexpr D16 k16{};
constexpr std::size_t kLanes = hn::MaxLanes(DF{});

/// Elements a loop takes at once: a full cache line of 16-bit elements, two of fp32.
constexpr std::size_t kGroup = 32;
static_assert(kGroup % kLanes == 0);

HWY_INLINE VU bits_of(VF x) {
  return hn::BitCast(kU, x);
}
HWY_INLINE VF float_of(VU bits) {
  return hn::BitCast(kF, bits);
}
HWY_INLINE VU word(std::uint32_t value) {
  return hn::Set(kU, value);
}

/// The low halves of 32-bit lanes; the high halves must be zero.
HWY_INLINE V16 narrow(VU x) {
  return hn::DemoteTo(k16, hn::BitCast(hn::RebindToSigned<DU>(), x));
}

HWY_INLINE VU load16(const void* from) {
  return hn::PromoteTo(kU, hn::LoadU(k16, static_cast<const std::uint16_t*>(from)));
}
HWY_INLINE void store16(VU x, void* to) {
  hn::StoreU(narrow(x), k16, static_cast<std::uint16_t*>(to));
}

// ---------------------------------------------------------------- NaN and denormals

HWY_INLINE bool any_nan(VF x) {
  return !hn::AllTrue(kF, hn::Eq(x, x));
}

/// Every NaN that arithmetic produced becomes the one quiet NaN: which operand's payload survives
/// an operation differs between instruction sets and compilers.
HWY_INLINE VF one_nan(VF x) {
  return hn::IfThenElse(hn::Eq(x, x), x, float_of(word(0x7FC00000U)));
}

/// Zero for what is denormal: a first moment that decays must not linger there, where every
/// multiplication takes a hundred times as long. A NaN stays as it is.
HWY_INLINE VF without_denormals(VF x) {
  return hn::IfThenZeroElse(hn::Lt(hn::Abs(x), hn::Set(kF, 0x1p-126F)), x);
}

// ---------------------------------------------------------------- casts

HWY_INLINE VF from_bf16(VU half) {
  return float_of(hn::ShiftLeft<16>(half));
}

/// Round to nearest even where x is not a NaN, or the one quiet NaN.
HWY_INLINE VU to_bf16_of_number(VF x) {
  const VU bits = bits_of(x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), word(1));
  return hn::ShiftRight<16>(hn::Add(hn::Add(bits, word(0x7FFF)), odd));
}

HWY_INLINE hn::Mask<DU> is_nan_bits(VU bits) {
  return hn::Gt(hn::And(bits, word(0x7FFFFFFFU)), word(0x7F800000U));
}

HWY_INLINE VU to_bf16(VF x) {
  const VU quiet = hn::Or(hn::ShiftRight<16>(bits_of(x)), word(0x0040));
  return hn::IfThenElse(is_nan_bits(bits_of(x)), quiet, to_bf16_of_number(x));
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3

using DH = hn::Rebind<hwy::float16_t, DF>;

HWY_INLINE VF load_fp16(const void* from) {
  const V16 half = hn::LoadU(k16, static_cast<const std::uint16_t*>(from));
  return hn::PromoteTo(kF, hn::BitCast(DH(), half));
}
HWY_INLINE V16 to_fp16(VF x) {
  return hn::BitCast(k16, hn::DemoteTo(DH(), x));
}

#else  // no conversion instruction: the same bits by integer arithmetic

HWY_INLINE VF load_fp16(const void* from) {
  const VU half = load16(from);
  const VU sign = hn::ShiftLeft<16>(hn::And(half, word(0x8000)));
  const VU shifted = hn::ShiftLeft<13>(hn::And(half, word(0x7FFF)));
  const VU normal = hn::Add(shifted, word(0x38000000U));  // exponent bias 15 → 127
  // A denormal is its significand times 2⁻²⁴: borrow an exponent, then subtract what it added.
  const VF borrowed = float_of(hn::Add(shifted, word(0x38800000U)));
  const VU denormal = bits_of(hn::Sub(borrowed, float_of(word(0x38800000U))));
  const VU special = hn::Add(shifted, word(0x70000000U));  // exponent 31 → 255
  const VU quiet = hn::Or(special, word(0x00400000U));
  VU out = hn::IfThenElse(hn::Lt(shifted, word(0x00800000U)), denormal, normal);
  out = hn::IfThenElse(hn::Gt(shifted, word(0x0F7FFFFFU)), special, out);
  out = hn::IfThenElse(hn::Gt(shifted, word(0x0F800000U)), quiet, out);
  return float_of(hn::Or(out, sign));
}

HWY_INLINE V16 to_fp16(VF x) {
  const VU bits = bits_of(x);
  const VU size = hn::And(bits, word(0x7FFFFFFFU));
  const VU sign = hn::And(hn::ShiftRight<16>(bits), word(0x8000));
  const VU odd = hn::And(hn::ShiftRight<13>(size), word(1));
  // Exponent bias 127 → 15, and a carry out of the significand moves up by itself.
  const VU biased = hn::Sub(size, word(0x38000000U - 0xFFFU));
  const VU normal = hn::ShiftRight<13>(hn::Add(biased, odd));
  // Below 2⁻¹⁴ the addition of ½ rounds to multiples of 2⁻²⁴, the denormal's unit.
  const VU half = word(0x3F000000U);
  const VU denormal = hn::Sub(bits_of(hn::Add(float_of(size), float_of(half))), half);
  const VU payload = hn::And(hn::ShiftRight<13>(size), word(0x3FF));
  VU out = hn::IfThenElse(hn::Lt(size, word(0x38800000U)), denormal, normal);
  out = hn::IfThenElse(hn::Gt(size, word(0x477FEFFFU)), word(0x7C00), out);  // from 65520 on
  out = hn::IfThenElse(hn::Gt(size, word(0x7F800000U)), hn::Or(payload, word(0x7E00)), out);
  return narrow(hn::Or(out, sign));
}

#endif

/// kLanes elements of type T as fp32.
template <Dtype T>
HWY_INLINE VF load(const void* from) {
  if constexpr (T == Dtype::F32) {
    return hn::LoadU(kF, static_cast<const float*>(from));
  } else if constexpr (T == Dtype::BF16) {
    return from_bf16(load16(from));
  } else {
    return load_fp16(from);
  }
}

/// Highway's Stream() writes whole registers of at least 16 bytes: fewer 16-bit lanes cannot use
/// it.
constexpr bool kCanStream16 = kLanes * sizeof(std::uint16_t) >= 16;

/// Rounds x to T and stores it. With kStream, past the caches: `to` is then aligned to the vector.
template <Dtype T, bool kStream, bool kMayBeNan = true>
HWY_INLINE void store(VF x, void* to) {
  if constexpr (T == Dtype::F32) {
    auto* out = static_cast<float*>(to);
    if constexpr (kStream) {
      hn::Stream(x, kF, out);
    } else {
      hn::StoreU(x, kF, out);
    }
  } else {
    V16 half;
    if constexpr (T == Dtype::F16) {
      half = to_fp16(x);
    } else {
      half = narrow(kMayBeNan ? to_bf16(x) : to_bf16_of_number(x));
    }
    auto* out = static_cast<std::uint16_t*>(to);
    if constexpr (kStream && kCanStream16) {
      hn::Stream(half, k16, out);
    } else {
      hn::StoreU(half, k16, out);
    }
  }
}

// ---------------------------------------------------------------- split master

struct Split {
  VU param;
  VU rest;
  VU tie;  // bit 31
};

/// The vector form of split_master().
HWY_INLINE Split split_lanes(VU bits) {
  const VU low = hn::And(bits, word(0xFFFF));
  const VU high = hn::ShiftRight<16>(bits);
  const VU param = to_bf16(float_of(bits));
  // Rounding changed the upper half, though the lower is exactly half or, in a NaN, anything.
  const auto changed = hn::Ne(param, high);
  const auto marked = hn::Or(hn::Eq(low, word(0x8000)), is_nan_bits(bits));
  return {param, low, hn::IfThenElseZero(hn::And(changed, marked), word(0x80000000U))};
}

/// The vector form of join_master(). `tie` may hold other bits beside bit 31.
HWY_INLINE VU join_lanes(VU param, VU rest, VU tie) {
  const VU joined = hn::Or(hn::ShiftLeft<16>(param), rest);
  const VU bit = hn::ShiftRight<31>(tie);
  const auto is_nan = hn::Gt(hn::And(param, word(0x7FFF)), word(0x7F80));
  const auto up = hn::Gt(hn::Add(rest, bit), word(0x8000));
  const VU number = hn::Sub(joined, hn::IfThenElseZero(up, word(0x10000U)));
  const VU nan = hn::AndNot(hn::ShiftLeft<22>(bit), joined);
  return hn::IfThenElse(is_nan, nan, number);
}

// ---------------------------------------------------------------- stochastic rounding

/// The vector form of rounding_bits() for one key.
class RandomLanes {
 public:
  explicit HWY_INLINE RandomLanes(RoundingKey key)
      : lanes_(hn::Iota(kU, 0)), first_(word(key.first)), second_(word(key.second)) {}

  /// The random words of elements index, index + 1, …
  HWY_INLINE VU at(std::uint32_t index) const {
    VU x = hn::Xor(hn::Add(lanes_, word(index)), first_);
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), word(0x7FEB352DU));
    x = hn::Add(x, second_);
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), word(0x846CA68BU));
    return hn::Xor(x, hn::ShiftRight<16>(x));
  }

 private:
  VU lanes_, first_, second_;
};

/// x rounded to bf16, up with the probability of its distance: `noise` is uniform in [0, 2¹⁶). x is
/// not a NaN, or the one quiet NaN.
HWY_INLINE VU to_bf16_stochastic(VF x, VU noise) {
  return hn::ShiftRight<16>(hn::Add(bits_of(x), noise));
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

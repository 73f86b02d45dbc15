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

#include <hwy/cache_control.h>
#include <hwy/highway.h>

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
using DPair = hn::Repartition<std::uint16_t, DU>;  // as many 16-bit lanes as two vectors have

constexpr DF kF{};
constexpr DU kU{};
constexpr D16 k16{};
constexpr DPair kPair{};
constexpr std::size_t kLanes = hn::MaxLanes(DF{});

/// Elements a loop takes at once: a full cache line of 16-bit elements, two of fp32.
constexpr std::size_t kGroup = 32;
static_assert(kGroup % (2 * kLanes) == 0);

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

/// A constant that the compiler must take for a variable, or it would make it anew in every round
/// of a loop.
HWY_INLINE VU held_word(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return hn::Set(kU, value);
}

/// Stores 2·kLanes 16-bit elements; with kStream past the caches, and `to` is then aligned.
template <bool kStream, class V>
HWY_INLINE void store_pair(V x, void* to) {
  auto* out = static_cast<std::uint16_t*>(to);
  if constexpr (kStream) {
    hn::Stream(x, kPair, out);
  } else {
    hn::StoreU(x, kPair, out);
  }
}

#if HWY_TARGET == HWY_SCALAR  // no vector holds two: one after the other

template <bool kStream>
HWY_INLINE void store_high(VU a, VU b, void* to) {
  store16(hn::ShiftRight<16>(a), to);
  store16(hn::ShiftRight<16>(b), static_cast<std::uint16_t*>(to) + 1);
}
template <bool kStream>
HWY_INLINE void store_low(VU a, VU b, void* to) {
  store16(hn::And(a, word(0xFFFF)), to);
  store16(hn::And(b, word(0xFFFF)), static_cast<std::uint16_t*>(to) + 1);
}
template <bool kStream>
HWY_INLINE void store_halves(V16 a, V16 b, void* to) {
  hn::StoreU(a, k16, static_cast<std::uint16_t*>(to));
  hn::StoreU(b, k16, static_cast<std::uint16_t*>(to) + 1);
}

#else

/// Stores the upper halves of the lanes of a, then of b.
template <bool kStream>
HWY_INLINE void store_high(VU a, VU b, void* to) {
  store_pair<kStream>(hn::ConcatOdd(kPair, hn::BitCast(kPair, b), hn::BitCast(kPair, a)), to);
}
/// Stores the lower halves of the lanes of a, then of b.
template <bool kStream>
HWY_INLINE void store_low(VU a, VU b, void* to) {
  store_pair<kStream>(hn::ConcatEven(kPair, hn::BitCast(kPair, b), hn::BitCast(kPair, a)), to);
}
template <bool kStream>
HWY_INLINE void store_halves(V16 a, V16 b, void* to) {
  store_pair<kStream>(hn::Combine(kPair, b, a), to);
}

#endif

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

/// Round to nearest even, in the upper half of the lane (the lower is not zero), where x is not a
/// NaN or the one quiet NaN.
HWY_INLINE VU rounded_number(VF x) {
  const VU bits = bits_of(x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), word(1));
  return hn::Add(hn::Add(bits, word(0x7FFF)), odd);
}

HWY_INLINE hn::Mask<DU> is_nan_bits(VU bits) {
  return hn::Gt(hn::And(bits, word(0x7FFFFFFFU)), word(0x7F800000U));
}

/// The same for any x.
HWY_INLINE VU rounded(VF x) {
  const VU quiet = hn::Or(bits_of(x), word(0x00400000U));
  return hn::IfThenElse(is_nan_bits(bits_of(x)), quiet, rounded_number(x));
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

/// Rounds 2·kLanes elements to T and stores them. With kStream, past the caches: `to` is then
/// aligned to the vector. Without kMayBeNan, a NaN is the one quiet NaN.
template <Dtype T, bool kStream, bool kMayBeNan = true>
HWY_INLINE void store(VF a, VF b, void* to) {
  if constexpr (T == Dtype::F32) {
    auto* out = static_cast<float*>(to);
    if constexpr (kStream) {
      hn::Stream(a, kF, out);
      hn::Stream(b, kF, out + kLanes);
    } else {
      hn::StoreU(a, kF, out);
      hn::StoreU(b, kF, out + kLanes);
    }
  } else if constexpr (T == Dtype::F16) {
    store_halves<kStream>(to_fp16(a), to_fp16(b), to);
  } else if constexpr (kMayBeNan) {
    store_high<kStream>(rounded(a), rounded(b), to);
  } else {
    store_high<kStream>(rounded_number(a), rounded_number(b), to);
  }
}

// ---------------------------------------------------------------- split master

struct Split {
  VU param;  // in the upper half, the lower is not zero
  VU rest;   // in the lower half, the upper is not zero
  VU tie;    // bit 31
};

/// The vector form of split_master().
HWY_INLINE Split split_lanes(VU bits) {
  const VU param = rounded(float_of(bits));
  // Rounding changed the upper half, though the lower is exactly half or, in a NaN, anything.
  const auto changed = hn::Ne(hn::ShiftRight<16>(param), hn::ShiftRight<16>(bits));
  const auto half = hn::Eq(hn::And(bits, word(0xFFFF)), word(0x8000));
  const auto marked = hn::And(changed, hn::Or(half, is_nan_bits(bits)));
  return {param, bits, hn::IfThenElseZero(marked, word(0x80000000U))};
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

/// split_lanes() where x is a number or the one quiet NaN.
HWY_INLINE Split split_number(VF x) {
  const VU bits = bits_of(x);
  const VU param = rounded_number(x);
  // With a lower half of exactly 0x8000 the sum's is 0xFFFF, or 0 where the tie went up.
  const VU both = hn::ShiftLeft<16>(hn::Or(hn::Xor(bits, word(0x8000)), param));
  return {param, bits, hn::IfThenElseZero(hn::Eq(both, hn::Zero(kU)), word(0x80000000U))};
}

/// join_lanes() where the payload of a NaN does not matter: it stays some NaN.
HWY_INLINE VU join_number(VU param, VU rest, VU tie) {
  const VU joined = hn::Or(hn::ShiftLeft<16>(param), rest);
  const auto up = hn::Gt(hn::Add(rest, hn::ShiftRight<31>(tie)), word(0x8000));
  return hn::Sub(joined, hn::IfThenElseZero(up, word(0x10000U)));
}

// ---------------------------------------------------------------- stochastic rounding

/// The vector form of rounding_bits() for one key.
class RandomLanes {
 public:
  explicit HWY_INLINE RandomLanes(RoundingKey key)
      : lanes_(hn::Iota(kU, 0)),
        first_(word(key.first)),
        second_(word(key.second)),
        multiplier1_(held_word(0x7FEB352DU)),
        multiplier2_(held_word(0x846CA68BU)),
        lower_(held_word(0xFFFFU)) {}

  /// The random words of elements index, index + 1, …
  HWY_INLINE VU at(std::uint32_t index) const {
    VU x = hn::Xor(hn::Add(lanes_, word(index)), first_);
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), multiplier1_);
    x = hn::Add(x, second_);
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), multiplier2_);
    return hn::Xor(x, hn::ShiftRight<16>(x));
  }

  /// x rounded to bf16 in the upper half of the lane, up with the probability of its distance, by
  /// the lower half of `random`. x is not a NaN, or the one quiet NaN.
  HWY_INLINE VU round_by_low(VF x, VU random) const {
    return hn::Add(bits_of(x), hn::And(random, lower_));
  }
  /// The same by the upper half.
  HWY_INLINE VU round_by_high(VF x, VU random) const {
    return hn::Add(bits_of(x), hn::ShiftRight<16>(random));
  }

 private:
  VU lanes_, first_, second_, multiplier1_, multiplier2_, lower_;
};

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

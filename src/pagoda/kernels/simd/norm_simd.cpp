// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/norm_simd.cpp"
#include <algorithm>
#include <cstring>
#include <limits>

#include <hwy/foreach_target.h>

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/gradient_norm.h"
#include "pagoda/kernels/simd/lanes-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

// ---------------------------------------------------------------- sum of squares

/// Element j of a block is added to sum j mod kSums, whatever the width of a register. As many sums
/// as a group has elements keep enough additions in flight.
constexpr std::size_t kSums = kGroup;
constexpr std::size_t kNormAhead = 1024;  // elements

using DD = hn::ScalableTag<double>;
using DHalf = hn::Rebind<float, DD>;  // as many fp32 as fit a register of doubles
constexpr std::size_t kDoubles = hn::MaxLanes(DD{});
constexpr std::size_t kRegisters = kSums / kDoubles;

/// kDoubles bf16 elements, widened.
HWY_INLINE hn::Vec<DD> load_bf16_as_double(const std::byte* from) {
  const hn::Rebind<std::uint16_t, DD> d16;
  const hn::Rebind<std::uint32_t, DD> d32;
  const auto half = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::PromoteTo(DD(), hn::BitCast(DHalf(), hn::ShiftLeft<16>(hn::PromoteTo(d32, half))));
}

/// The sum of squares of up to kNormBlock elements. The square of an fp32 is exact in double.
template <Dtype kType>
double square_block(const std::byte* values, std::size_t count) {
  constexpr DD d{};
  constexpr std::size_t kSize = element_size(kType);
  hn::Vec<DD> sums[kRegisters];
  for (auto& sum : sums) sum = hn::Zero(d);
  const auto add_group = [&](const std::byte* group) HWY_ATTR {
    alignas(64) float wide[kGroup];  // used for fp16 only
    if constexpr (kType == Dtype::F16) {
      for (std::size_t j = 0; j < kGroup; j += kLanes) {
        hn::Store(load<kType>(group + j * kSize), kF, wide + j);
      }
    }
#pragma GCC unroll 16
    for (std::size_t r = 0; r < kRegisters; ++r) {
      hn::Vec<DD> x;
      if constexpr (kType == Dtype::F32) {
        x = hn::PromoteTo(d,
                          hn::LoadU(DHalf(), reinterpret_cast<const float*>(group) + r * kDoubles));
      } else if constexpr (kType == Dtype::BF16) {
        x = load_bf16_as_double(group + r * kDoubles * kSize);
      } else {
        x = hn::PromoteTo(d, hn::LoadU(DHalf(), wide + r * kDoubles));
      }
      sums[r] = hn::Add(sums[r], hn::Mul(x, x));
    }
  };
  std::size_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    hwy::Prefetch(values + (i + kNormAhead) * kSize);
    if constexpr (kSize == 4) hwy::Prefetch(values + (i + kNormAhead) * kSize + 64);
    add_group(values + i * kSize);
  }
  if (i < count) {
    alignas(64) std::byte part[4 * kGroup] = {};  // zeros add nothing: +0 to a sum that is not −0
    std::memcpy(part, values + i * kSize, (count - i) * kSize);
    add_group(part);
  }
  alignas(64) double total[kSums];
  for (std::size_t r = 0; r < kRegisters; ++r) hn::StoreU(sums[r], d, total + r * kDoubles);
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) total[j] += total[j + half];
  }
  return total[0];
}

template <Dtype kType>
void square_blocks(const void* array, std::size_t count, double scale, double* blocks) {
  const auto* values = static_cast<const std::byte*>(array);
  const double squared = scale * scale;
  for (std::size_t i = 0; i < count; i += kNormBlock) {
    const double sum =
        square_block<kType>(values + i * element_size(kType), std::min(kNormBlock, count - i));
    const double scaled = sum * squared;
    *blocks++ = scaled == scaled ? scaled : std::numeric_limits<double>::quiet_NaN();
  }
}

void sum_squares(ConstElements values, std::size_t count, double scale, double* blocks) {
  switch (values.type) {
    case Dtype::F32:
      return square_blocks<Dtype::F32>(values.data, count, scale, blocks);
    case Dtype::BF16:
      return square_blocks<Dtype::BF16>(values.data, count, scale, blocks);
    case Dtype::F16:
      return square_blocks<Dtype::F16>(values.data, count, scale, blocks);
  }
}

// ---------------------------------------------------------------- finite

/// Whether a word of `Word` bits has all of `exponent` set anywhere in [values, values + count).
template <class Word>
bool any_special(const Word* values, std::size_t count, Word exponent) {
  const hn::ScalableTag<Word> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto mask = hn::Set(d, exponent);
  constexpr std::size_t kStretch = 4096;  // elements between looks at the result
  std::size_t i = 0;
  while (i + lanes <= count) {
    const std::size_t end = std::min(count, i + kStretch);
    auto found = hn::MaskFromVec(hn::Zero(d));
    for (; i + lanes <= end; i += lanes) {
      hwy::Prefetch(values + i + kNormAhead);
      const auto bits = hn::And(hn::LoadU(d, values + i), mask);
      found = hn::Or(found, hn::Eq(bits, mask));
    }
    if (!hn::AllFalse(d, found)) return true;
  }
  for (; i < count; ++i) {
    if ((values[i] & exponent) == exponent) return true;
  }
  return false;
}

bool finite(ConstElements values, std::size_t count) {
  if (values.type == Dtype::F32) {
    return !any_special(static_cast<const std::uint32_t*>(values.data), count, 0x7F800000U);
  }
  const std::uint16_t exponent = values.type == Dtype::BF16 ? 0x7F80 : 0x7C00;
  return !any_special(static_cast<const std::uint16_t*>(values.data), count, exponent);
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::sum_squares) kSumSquares[kIsaCount] = PAGODA_PER_ISA(sum_squares);
const decltype(KernelTable::all_finite) kAllFinite[kIsaCount] = PAGODA_PER_ISA(finite);
}  // namespace pagoda::kernels
#endif

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/cast_simd.cpp"
#include <cstring>

#include <hwy/foreach_target.h>

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/simd/lanes-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

// ---------------------------------------------------------------- casts

/// From this many elements on the result goes past the caches, as a parameter does in a step.
constexpr std::size_t kCastStreamFrom = 32768;
constexpr std::size_t kCastAhead = 1024;  // elements

template <Dtype kFrom, Dtype kTo, bool kStream>
HWY_INLINE void cast_group(const std::byte* from, std::byte* to) {
  constexpr std::size_t kNext = kLanes * element_size(kFrom);
  for (std::size_t j = 0; j < kGroup; j += 2 * kLanes) {
    const std::byte* at = from + j * element_size(kFrom);
    store<kTo, kStream>(load<kFrom>(at), load<kFrom>(at + kNext), to + j * element_size(kTo));
  }
}

template <Dtype kFrom, Dtype kTo>
void cast_part(const std::byte* from, std::byte* to, std::size_t count) {
  alignas(64) std::byte in[4 * kGroup] = {};
  alignas(64) std::byte out[4 * kGroup];
  std::memcpy(in, from, count * element_size(kFrom));
  cast_group<kFrom, kTo, false>(in, out);
  std::memcpy(to, out, count * element_size(kTo));
}

template <Dtype kFrom, Dtype kTo>
void cast_all(const void* from_array, void* to_array, std::size_t count) {
  constexpr std::size_t kIn = element_size(kFrom);
  constexpr std::size_t kOut = element_size(kTo);
  const auto* from = static_cast<const std::byte*>(from_array);
  auto* to = static_cast<std::byte*>(to_array);
  std::size_t i = 0;
  const std::size_t past_line = reinterpret_cast<std::uintptr_t>(to) % 64;
  if (count >= kCastStreamFrom && past_line % kOut == 0) {
    i = (64 - past_line) % 64 / kOut;
    if (i > 0) cast_part<kFrom, kTo>(from, to, i);
    for (; i + kGroup <= count; i += kGroup) {
      hwy::Prefetch(from + (i + kCastAhead) * kIn);
      if constexpr (kIn == 4) hwy::Prefetch(from + (i + kCastAhead) * kIn + 64);
      cast_group<kFrom, kTo, true>(from + i * kIn, to + i * kOut);
    }
    hwy::FlushStream();
  } else {
    for (; i + kGroup <= count; i += kGroup) {
      cast_group<kFrom, kTo, false>(from + i * kIn, to + i * kOut);
    }
  }
  if (i < count) cast_part<kFrom, kTo>(from + i * kIn, to + i * kOut, count - i);
}

template <Dtype kFrom>
void cast_from(const void* from, Elements to, std::size_t count) {
  switch (to.type) {
    case Dtype::F32:
      return cast_all<kFrom, Dtype::F32>(from, to.data, count);
    case Dtype::BF16:
      return cast_all<kFrom, Dtype::BF16>(from, to.data, count);
    case Dtype::F16:
      return cast_all<kFrom, Dtype::F16>(from, to.data, count);
  }
}

void cast_elements(ConstElements from, Elements to, std::size_t count) {
  if (from.type == to.type) {
    std::memcpy(to.data, from.data, count * element_size(to.type));
    return;
  }
  switch (from.type) {
    case Dtype::F32:
      return cast_from<Dtype::F32>(from.data, to, count);
    case Dtype::BF16:
      return cast_from<Dtype::BF16>(from.data, to, count);
    case Dtype::F16:
      return cast_from<Dtype::F16>(from.data, to, count);
  }
}

// ---------------------------------------------------------------- split master

/// kLanes elements of each, from the starts of the arrays.
template <Dtype kVariance>
HWY_INLINE void split_one(const float* master, std::uint16_t* param, std::uint16_t* rest,
                          std::byte* variance) {
  const Split split = split_lanes(hn::LoadU(kU, reinterpret_cast<const std::uint32_t*>(master)));
  store16(hn::ShiftRight<16>(split.param), param);
  store16(hn::And(split.rest, word(0xFFFF)), rest);
  if constexpr (kVariance == Dtype::F32) {
    auto* v = reinterpret_cast<std::uint32_t*>(variance);
    const VU size = hn::And(hn::LoadU(kU, v), word(0x7FFFFFFFU));
    hn::StoreU(hn::Or(size, split.tie), kU, v);
  } else {
    const VU size = hn::And(load16(variance), word(0x7FFF));
    store16(hn::Or(size, hn::ShiftRight<16>(split.tie)), variance);
  }
}

template <Dtype kVariance>
HWY_INLINE void join_one(const std::uint16_t* param, const std::uint16_t* rest,
                         const std::byte* variance, float* master) {
  VU tie;
  if constexpr (kVariance == Dtype::F32) {
    tie = hn::LoadU(kU, reinterpret_cast<const std::uint32_t*>(variance));
  } else {
    tie = hn::ShiftLeft<16>(load16(variance));
  }
  const VU bits = join_lanes(load16(param), load16(rest), tie);
  hn::StoreU(bits, kU, reinterpret_cast<std::uint32_t*>(master));
}

template <Dtype kVariance>
void split_all(const float* master, std::uint16_t* param, std::uint16_t* rest, std::byte* variance,
               std::size_t count) {
  constexpr std::size_t kSize = element_size(kVariance);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    split_one<kVariance>(master + i, param + i, rest + i, variance + i * kSize);
  }
  if (i == count) return;
  const std::size_t n = count - i;
  float part[kLanes] = {};
  std::uint16_t high[kLanes], low[kLanes];
  alignas(4) std::byte v[4 * kLanes] = {};
  std::memcpy(part, master + i, n * 4);
  std::memcpy(v, variance + i * kSize, n * kSize);
  split_one<kVariance>(part, high, low, v);
  std::memcpy(param + i, high, n * 2);
  std::memcpy(rest + i, low, n * 2);
  std::memcpy(variance + i * kSize, v, n * kSize);
}

template <Dtype kVariance>
void join_all(const std::uint16_t* param, const std::uint16_t* rest, const std::byte* variance,
              float* master, std::size_t count) {
  constexpr std::size_t kSize = element_size(kVariance);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    join_one<kVariance>(param + i, rest + i, variance + i * kSize, master + i);
  }
  if (i == count) return;
  const std::size_t n = count - i;
  float part[kLanes];
  std::uint16_t high[kLanes] = {}, low[kLanes] = {};
  alignas(4) std::byte v[4 * kLanes] = {};
  std::memcpy(high, param + i, n * 2);
  std::memcpy(low, rest + i, n * 2);
  std::memcpy(v, variance + i * kSize, n * kSize);
  join_one<kVariance>(high, low, v, part);
  std::memcpy(master + i, part, n * 4);
}

void split_elements(const float* master, Bf16* param, std::int16_t* rest, Elements variance,
                    std::size_t count) {
  auto* high = reinterpret_cast<std::uint16_t*>(param);
  auto* low = reinterpret_cast<std::uint16_t*>(rest);
  auto* v = static_cast<std::byte*>(variance.data);
  if (variance.type == Dtype::F32) return split_all<Dtype::F32>(master, high, low, v, count);
  return split_all<Dtype::BF16>(master, high, low, v, count);
}

void join_elements(const Bf16* param, const std::int16_t* rest, ConstElements variance,
                   float* master, std::size_t count) {
  const auto* high = reinterpret_cast<const std::uint16_t*>(param);
  const auto* low = reinterpret_cast<const std::uint16_t*>(rest);
  const auto* v = static_cast<const std::byte*>(variance.data);
  if (variance.type == Dtype::F32) return join_all<Dtype::F32>(high, low, v, master, count);
  return join_all<Dtype::BF16>(high, low, v, master, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::cast) kCast[kIsaCount] = PAGODA_PER_ISA(cast_elements);
const decltype(KernelTable::split) kSplit[kIsaCount] = PAGODA_PER_ISA(split_elements);
const decltype(KernelTable::join) kJoin[kIsaCount] = PAGODA_PER_ISA(join_elements);
}  // namespace pagoda::kernels
#endif

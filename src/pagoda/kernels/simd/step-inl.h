// SPDX-License-Identifier: Apache-2.0
// The loop that all optimizers share: reads gradient, master and moments of a group of elements,
// lets a rule change them, rounds and writes them back. Included once per target.
//
// A rule is a struct of broadcast scalars with
//   static constexpr bool kHasVariance;
//   void operator()(VF grad, VF& param, VF& momentum, VF& variance) const;
// that leaves only numbers and the one quiet NaN behind.
#if defined(PAGODA_KERNELS_STEP_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGODA_KERNELS_STEP_INL_H
#undef PAGODA_KERNELS_STEP_INL_H
#else
#define PAGODA_KERNELS_STEP_INL_H
#endif

#include <algorithm>
#include <cstring>

#include "pagoda/kernels/optimizer_slice.h"
#include "pagoda/kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

enum class Moments : std::uint8_t { None, F32, BF16 };

/// What happens to the parameter. A loop-invariant branch rather than a template argument: it costs
/// nothing beside the memory, and a quarter of the code.
enum class Output : std::uint8_t { None, F32, BF16, F16, F32Stream, BF16Stream, F16Stream };

/// From this many elements on the parameter, which is only written, goes past the caches: a line
/// need not be read first. Below, it may as well stay for whoever asked.
constexpr std::size_t kStreamFrom = 32768;

/// How far ahead lines are asked for. The processor's own prefetcher stops at every 4 KiB.
constexpr std::size_t kAhead = 512;  // elements

/// Elements of a slice as plain pointers; what is absent is null and never touched.
struct Arrays {
  const std::byte* grad;
  float* master;
  std::uint16_t* rest;
  std::byte* param;
  std::byte* momentum;
  std::byte* variance;
};

HWY_INLINE void put_param(Output output, VF p, std::byte* param, std::size_t i) {
  switch (output) {
    case Output::None:
      return;
    case Output::F32:
      return store<Dtype::F32, false>(p, param + 4 * i);
    case Output::BF16:
      return store<Dtype::BF16, false, false>(p, param + 2 * i);
    case Output::F16:
      return store<Dtype::F16, false>(p, param + 2 * i);
    case Output::F32Stream:
      return store<Dtype::F32, true>(p, param + 4 * i);
    case Output::BF16Stream:
      return store<Dtype::BF16, true, false>(p, param + 2 * i);
    case Output::F16Stream:
      return store<Dtype::F16, true>(p, param + 2 * i);
  }
}

template <class Rule, Dtype kGrad, Moments kMoments, bool kSplit>
class StepLoop {
 public:
  static void run(const Rule& rule, const OptimizerSlice& slice, RoundingKey key) {
    const Arrays a = {static_cast<const std::byte*>(slice.grad.data),
                      slice.master,
                      reinterpret_cast<std::uint16_t*>(slice.rest),
                      static_cast<std::byte*>(slice.param.data),
                      static_cast<std::byte*>(slice.momentum.data),
                      static_cast<std::byte*>(slice.variance.data)};
    const auto index = static_cast<std::uint32_t>(slice.first_index);
    const std::size_t width = element_size(slice.param.type);
    Output output = Output::None;
    std::size_t i = 0;
    if (!kSplit && a.param != nullptr) {
      output = static_cast<Output>(1 + static_cast<int>(slice.param.type));
      const std::size_t past_line = reinterpret_cast<std::uintptr_t>(a.param) % 64;
      if (slice.count >= kStreamFrom && past_line % width == 0) {
        const std::size_t head = (64 - past_line) % 64 / width;
        if (head > 0) partial(rule, a, i, head, output, key, index);
        i = head;
        output = static_cast<Output>(3 + static_cast<int>(output));
      }
    }
    const Output in_cache =
        output > Output::F16 ? static_cast<Output>(static_cast<int>(output) - 3) : output;
    for (; i + kGroup <= slice.count; i += kGroup) {
      prefetch(a, i + kAhead);
      group(rule, a, i, output, key, index + static_cast<std::uint32_t>(i));
    }
    if (i < slice.count) partial(rule, a, i, slice.count - i, in_cache, key, index);
    if (output != in_cache) hwy::FlushStream();
  }

 private:
  static constexpr std::size_t kGradSize = element_size(kGrad);
  static constexpr std::size_t kMomentSize = kMoments == Moments::BF16 ? 2 : 4;

  template <std::size_t kSize>
  static HWY_INLINE void prefetch_group(const void* array, std::size_t i) {
    const auto* at = static_cast<const std::byte*>(array) + i * kSize;
    hwy::Prefetch(at);
    if constexpr (kSize == 4) hwy::Prefetch(at + 64);
  }

  static HWY_INLINE void prefetch(const Arrays& a, std::size_t i) {
    prefetch_group<kGradSize>(a.grad, i);
    if constexpr (kSplit) {
      prefetch_group<2>(a.param, i);
      prefetch_group<2>(a.rest, i);
    } else {
      prefetch_group<4>(a.master, i);
    }
    if constexpr (kMoments != Moments::None) prefetch_group<kMomentSize>(a.momentum, i);
    if constexpr (Rule::kHasVariance) prefetch_group<kMomentSize>(a.variance, i);
  }

  static HWY_INLINE void group(const Rule& rule, const Arrays& a, std::size_t i, Output output,
                               RoundingKey key, std::uint32_t index) {
    for (std::size_t j = 0; j < kGroup; j += kLanes) {
      lanes(rule, a, i + j, output, key, index + static_cast<std::uint32_t>(j));
    }
  }

  /// kLanes elements from i on; `index` is the first one's place in the parameter.
  static HWY_INLINE void lanes(const Rule& rule, const Arrays& a, std::size_t i, Output output,
                               RoundingKey key, std::uint32_t index) {
    constexpr Dtype kStored = kMoments == Moments::BF16 ? Dtype::BF16 : Dtype::F32;
    const VF g = load<kGrad>(a.grad + i * kGradSize);
    VF m = hn::Zero(kF);
    VF v = hn::Zero(kF);
    if constexpr (kMoments != Moments::None) m = load<kStored>(a.momentum + i * kMomentSize);
    if constexpr (Rule::kHasVariance) v = load<kStored>(a.variance + i * kMomentSize);
    VF p;
    if constexpr (kSplit) {
      p = float_of(join_lanes(load16(a.param + 2 * i), load16(a.rest + i), bits_of(v)));
      v = hn::Abs(v);
    } else {
      p = hn::LoadU(kF, a.master + i);
    }

    rule(g, p, m, v);

    VU tie = hn::Zero(kU);
    if constexpr (kSplit) {
      const Split split = split_lanes(bits_of(p));
      store16(split.param, a.param + 2 * i);
      store16(split.rest, a.rest + i);
      tie = split.tie;
    } else {
      hn::StoreU(p, kF, a.master + i);
      put_param(output, p, a.param, i);
    }
    if constexpr (kMoments == Moments::F32) {
      hn::StoreU(m, kF, reinterpret_cast<float*>(a.momentum) + i);
      if constexpr (Rule::kHasVariance) {
        if constexpr (kSplit) v = float_of(hn::Or(bits_of(v), tie));
        hn::StoreU(v, kF, reinterpret_cast<float*>(a.variance) + i);
      }
    } else if constexpr (kMoments == Moments::BF16) {
      const VU random = random_lanes(key, index);
      store16(to_bf16_stochastic(m, hn::And(random, word(0xFFFF))), a.momentum + 2 * i);
      if constexpr (Rule::kHasVariance) {
        VU half = to_bf16_stochastic(v, hn::ShiftRight<16>(random));
        if constexpr (kSplit) half = hn::Or(half, hn::ShiftRight<16>(tie));
        store16(half, a.variance + 2 * i);
      }
    }
  }

  /// `count` < kGroup elements from i on, by way of a group on the stack: there is no second form
  /// of the arithmetic for the ends of an array.
  static HWY_NOINLINE void partial(const Rule& rule, const Arrays& a, std::size_t i,
                                   std::size_t count, Output output, RoundingKey key,
                                   std::uint32_t index) {
    alignas(64) std::byte grad[4 * kGroup] = {};
    alignas(64) float master[kGroup] = {};
    alignas(64) std::uint16_t rest[kGroup] = {};
    alignas(64) std::byte param[4 * kGroup] = {};
    alignas(64) std::byte momentum[4 * kGroup] = {};
    alignas(64) std::byte variance[4 * kGroup] = {};
    const std::size_t param_size = output == Output::F32 ? 4 : 2;
    const auto copy_in = [&](void* to, const void* from, std::size_t size) {
      if (from != nullptr)
        std::memcpy(to, static_cast<const std::byte*>(from) + i * size, count * size);
    };
    const auto copy_out = [&](void* to, const void* from, std::size_t size) {
      if (to != nullptr) std::memcpy(static_cast<std::byte*>(to) + i * size, from, count * size);
    };
    copy_in(grad, a.grad, kGradSize);
    copy_in(master, a.master, 4);
    copy_in(rest, a.rest, 2);
    if constexpr (kSplit) copy_in(param, a.param, 2);
    if constexpr (kMoments != Moments::None) copy_in(momentum, a.momentum, kMomentSize);
    if constexpr (Rule::kHasVariance) copy_in(variance, a.variance, kMomentSize);
    const Arrays local = {grad, master, rest, param, momentum, variance};
    group(rule, local, 0, output, key, index + static_cast<std::uint32_t>(i));
    copy_out(a.master, master, 4);
    copy_out(a.rest, rest, 2);
    if (kSplit || output != Output::None) copy_out(a.param, param, param_size);
    if constexpr (kMoments != Moments::None) copy_out(a.momentum, momentum, kMomentSize);
    if constexpr (Rule::kHasVariance) copy_out(a.variance, variance, kMomentSize);
  }
};

/// Picks the loop for the types of the slice.
template <class Rule, Moments kMoments, bool kSplit>
void run_for_grad(const Rule& rule, const OptimizerSlice& slice, RoundingKey key) {
  switch (slice.grad.type) {
    case Dtype::F32:
      return StepLoop<Rule, Dtype::F32, kMoments, kSplit>::run(rule, slice, key);
    case Dtype::BF16:
      return StepLoop<Rule, Dtype::BF16, kMoments, kSplit>::run(rule, slice, key);
    case Dtype::F16:
      return StepLoop<Rule, Dtype::F16, kMoments, kSplit>::run(rule, slice, key);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

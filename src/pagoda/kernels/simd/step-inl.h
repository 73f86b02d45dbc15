// SPDX-License-Identifier: Apache-2.0
// The loop that all optimizers share: reads gradient, master and moments of a group of elements,
// lets a rule change them, rounds and writes them back. Included once per target.
//
// A rule is a struct of broadcast scalars with
//   using Scalars = …;  explicit Rule(const Scalars&);  static constexpr bool kHasVariance;
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
#include <type_traits>
#include <utility>

#include "pagoda/kernels/optimizer_shard.h"
#include "pagoda/kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

enum class Moments : std::uint8_t { None, F32, BF16 };

/// What becomes of the master: it is the parameter, or is written once more in 16 bits, or lives
/// split in the parameter and a rest.
enum class Output : std::uint8_t { None, BF16, F16, Split };

/// Where states, and parameters that are read, are written.
enum class Place : std::uint8_t { AsRead, Elsewhere };

/// From this many elements on, what is only written goes past the caches: a line need not be read
/// first. Below, it may as well stay for whoever asked.
constexpr std::size_t kStreamFrom = 32768;

/// How far ahead lines are asked for. The processor's own prefetcher stops at every 4 KiB.
constexpr std::size_t kAhead = 512;  // elements

/// Elements between two copies of an fp32 master to an fp32 parameter.
constexpr std::size_t kCopyStretch = 2048;

/// Elements of a shard as plain pointers; what is absent is null and never touched.
struct Arrays {
  const std::byte* grad;
  float* master;
  std::uint16_t* rest;
  std::byte* param;
  std::byte* momentum;
  std::byte* variance;
  /// Where things are written: for Place::Elsewhere only, and may be where they are read.
  struct {
    float* master;
    std::uint16_t* rest;
    std::byte* param;  // of a split master; others' is only written
    std::byte* momentum;
    std::byte* variance;
  } to;
};

/// What goes past the caches. It is aligned to 64 bytes at the first element.
struct Past {
  bool param = false;
  bool states = false;  // with Place::Elsewhere only
};

/// Elements [begin, end), whole groups, of some arrays; `index` is the place of element 0 in its
/// parameter.
template <class Scalars>
using GroupsFunction = void (*)(const Scalars&, const Arrays&, std::size_t begin, std::size_t end,
                                Past past, RoundingKey key, std::uint32_t index);

template <class Rule, Dtype kGrad, Moments kMoments, Output kOutput, Place kPlace>
class StepLoop {
 public:
  static void groups(const typename Rule::Scalars& scalars, const Arrays& arrays, std::size_t begin,
                     std::size_t end, Past past, RoundingKey key, std::uint32_t index) {
    // Copies that no store can reach: they stay in registers.
    const Rule rule(scalars);
    const RandomLanes noise(key);
    const Arrays a = arrays;
    for (std::size_t i = begin; i < end; i += kGroup) {
      prefetch(a, i + kAhead);
      for (std::size_t j = i; j < i + kGroup; j += 2 * kLanes) {
        pair(rule, a, j, past, noise, index + static_cast<std::uint32_t>(j));
      }
    }
  }

 private:
  static constexpr bool kSplit = kOutput == Output::Split;
  static constexpr bool kElsewhere = kPlace == Place::Elsewhere;
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

  /// kLanes elements, from memory through the rule.
  struct Lanes {
    VF p, m, v;

    HWY_INLINE Lanes(const Rule& rule, const Arrays& a, std::size_t i) {
      constexpr Dtype kStored = kMoments == Moments::BF16 ? Dtype::BF16 : Dtype::F32;
      const VF g = load<kGrad>(a.grad + i * kGradSize);
      m = v = hn::Zero(kF);
      if constexpr (kMoments != Moments::None) m = load<kStored>(a.momentum + i * kMomentSize);
      if constexpr (Rule::kHasVariance) v = load<kStored>(a.variance + i * kMomentSize);
      if constexpr (kSplit) {
        p = float_of(join_number(load16(a.param + 2 * i), load16(a.rest + i), bits_of(v)));
        v = hn::Abs(v);
      } else {
        p = hn::LoadU(kF, a.master + i);
      }
      rule(g, p, m, v);
    }
  };

  /// Two vectors from element i on; `index` is the first one's place in the parameter.
  static HWY_INLINE void pair(const Rule& rule, const Arrays& a, std::size_t i, Past past,
                              const RandomLanes& noise, std::uint32_t index) {
    Lanes x(rule, a, i);
    Lanes y(rule, a, i + kLanes);
    if constexpr (kSplit) {
      const Split split_x = split_number(x.p);
      const Split split_y = split_number(y.p);
      std::byte* const param = (kElsewhere ? a.to.param : a.param) + 2 * i;
      store_high<false>(split_x.param, split_y.param, param);
      std::uint16_t* const rest = (kElsewhere ? a.to.rest : a.rest) + i;
      state(past, [&](auto stream) { store_low<stream>(split_x.rest, split_y.rest, rest); });
      store_moments(x, y, split_x.tie, split_y.tie, a, i, past, noise, index);
    } else {
      float* const master = (kElsewhere ? a.to.master : a.master) + i;
      // A master that is the parameter goes to what has just been read.
      const Past by = kOutput == Output::None ? Past{} : past;
      state(by, [&](auto stream) { store<Dtype::F32, stream>(x.p, y.p, master); });
      if constexpr (kOutput == Output::BF16) put<Dtype::BF16>(x.p, y.p, a.param + 2 * i, past);
      if constexpr (kOutput == Output::F16) put<Dtype::F16>(x.p, y.p, a.param + 2 * i, past);
      store_moments(x, y, hn::Zero(kU), hn::Zero(kU), a, i, past, noise, index);
    }
  }

  /// write(stream) stores a state; `stream`, a constant, says whether past the caches.
  template <class Write>
  static HWY_INLINE void state(Past past, const Write& write) {
    if constexpr (kElsewhere) {
      if (past.states) return write(std::true_type());
    }
    write(std::false_type());
  }

  /// The ties go to the signs of the variance.
  static HWY_INLINE void store_moments(const Lanes& x, const Lanes& y, VU tie_x, VU tie_y,
                                       const Arrays& a, std::size_t i, Past past,
                                       const RandomLanes& noise, std::uint32_t index) {
    if constexpr (kMoments != Moments::None) {
      std::byte* const momentum = (kElsewhere ? a.to.momentum : a.momentum) + kMomentSize * i;
      std::byte* variance = nullptr;
      if constexpr (Rule::kHasVariance) {
        variance = (kElsewhere ? a.to.variance : a.variance) + kMomentSize * i;
      }
      if constexpr (kMoments == Moments::F32) {
        state(past, [&](auto stream) { store<Dtype::F32, stream>(x.m, y.m, momentum); });
        if constexpr (Rule::kHasVariance) {
          const VF signed_x = float_of(hn::Or(bits_of(x.v), tie_x));
          const VF signed_y = float_of(hn::Or(bits_of(y.v), tie_y));
          state(past,
                [&](auto stream) { store<Dtype::F32, stream>(signed_x, signed_y, variance); });
        }
      } else {
        const VU random_x = noise.at(index);
        const VU random_y = noise.at(index + static_cast<std::uint32_t>(kLanes));
        const VU m_x = noise.round_by_low(x.m, random_x);
        const VU m_y = noise.round_by_low(y.m, random_y);
        state(past, [&](auto stream) { store_high<stream>(m_x, m_y, momentum); });
        if constexpr (Rule::kHasVariance) {
          const VU v_x = hn::Or(noise.round_by_high(x.v, random_x), tie_x);
          const VU v_y = hn::Or(noise.round_by_high(y.v, random_y), tie_y);
          state(past, [&](auto stream) { store_high<stream>(v_x, v_y, variance); });
        }
      }
    }
  }

  template <Dtype kType>
  static HWY_INLINE void put(VF a, VF b, std::byte* to, Past past) {
    if (past.param) {
      store<kType, true, false>(a, b, to);
    } else {
      store<kType, false, false>(a, b, to);
    }
  }
};

/// Elements [begin, begin + count), fewer than a group, by way of a group on the stack: there is no
/// second form of the arithmetic for the ends of an array.
template <class Scalars>
void partial_group(GroupsFunction<Scalars> groups, const Scalars& scalars,
                   const OptimizerShard& shard, std::size_t begin, std::size_t count,
                   RoundingKey key) {
  alignas(64) std::byte grad[4 * kGroup] = {};
  alignas(64) float master[kGroup] = {};
  alignas(64) std::uint16_t rest[kGroup] = {};
  alignas(64) std::byte param[4 * kGroup] = {};
  alignas(64) std::byte momentum[4 * kGroup] = {};
  alignas(64) std::byte variance[4 * kGroup] = {};
  const OptimizerShard part = shard.part(begin, begin + count);
  const auto copy = [&](void* to, const void* from, std::size_t size) {
    if (to != nullptr && from != nullptr) std::memcpy(to, from, count * size);
  };
  const std::size_t param_size = element_size(part.param.type);
  const std::size_t moment_size = element_size(part.momentum.type);
  copy(grad, part.grad.data, element_size(part.grad.type));
  copy(master, part.master, sizeof(float));
  copy(rest, part.rest, sizeof(std::uint16_t));
  copy(param, part.param.data, param_size);
  copy(momentum, part.momentum.data, moment_size);
  copy(variance, part.variance.data, moment_size);
  const Arrays local = {
      grad, master, rest, param, momentum, variance, {master, rest, param, momentum, variance}};
  groups(scalars, local, 0, kGroup, {}, key, static_cast<std::uint32_t>(part.first_index));
  const OptimizerShard::Written to = part.written();
  copy(to.master, master, sizeof(float));
  copy(to.rest, rest, sizeof(std::uint16_t));
  copy(to.param.data, param, param_size);
  copy(to.momentum.data, momentum, moment_size);
  copy(to.variance.data, variance, moment_size);
}

/// Elements before the first full line of an array; all arrays should have as many.
inline std::size_t before_line(const void* data, std::size_t size) noexcept {
  return (64 - reinterpret_cast<std::uintptr_t>(data) % 64) % 64 / size;
}

/// Whether element i of each of these states starts a line. Absent ones do.
inline bool all_start_line(const OptimizerShard::Written& states, std::size_t i) noexcept {
  const auto starts = [i](const void* data, std::size_t size) {
    return data == nullptr || (reinterpret_cast<std::uintptr_t>(data) + i * size) % 64 == 0;
  };
  return starts(states.master, sizeof(float)) && starts(states.rest, sizeof(std::int16_t)) &&
         starts(states.momentum.data, element_size(states.momentum.type)) &&
         starts(states.variance.data, element_size(states.variance.type));
}

/// A whole shard: what precedes the first full line of what is only written, the groups, the rest.
template <class Scalars>
void walk(GroupsFunction<Scalars> groups, const Scalars& scalars, const OptimizerShard& shard,
          RoundingKey key) {
  if (shard.param && shard.param.type == Dtype::F32) {
    // A second fp32 copy is rare: made from the master, a stretch at a time while that is cached.
    for (std::size_t begin = 0; begin < shard.count; begin += kCopyStretch) {
      OptimizerShard part = shard.part(begin, std::min(shard.count, begin + kCopyStretch));
      void* copy = std::exchange(part.param.data, nullptr);
      walk(groups, scalars, part, key);
      std::memcpy(copy, part.written().master, part.count * sizeof(float));
    }
    return;
  }
  const OptimizerShard::Written to = shard.written();
  const Arrays a = {
      static_cast<const std::byte*>(shard.grad.data),
      shard.master,
      reinterpret_cast<std::uint16_t*>(shard.rest),
      static_cast<std::byte*>(shard.param.data),
      static_cast<std::byte*>(shard.momentum.data),
      static_cast<std::byte*>(shard.variance.data),
      {to.master, reinterpret_cast<std::uint16_t*>(to.rest), static_cast<std::byte*>(to.param.data),
       static_cast<std::byte*>(to.momentum.data), static_cast<std::byte*>(to.variance.data)}};
  const bool is_long = shard.count >= kStreamFrom;
  Past past;
  past.param = is_long && shard.param && shard.rest == nullptr;
  std::size_t i = 0;
  if (past.param) {
    i = before_line(a.param, element_size(shard.param.type));
  } else if (is_long && shard.states_elsewhere()) {
    i = before_line(to.momentum.data, element_size(to.momentum.type));
  }
  past.states = is_long && shard.states_elsewhere() && all_start_line(shard.to, i);
  if (i > 0) partial_group(groups, scalars, shard, 0, i, key);
  const std::size_t end = i + (shard.count - i) / kGroup * kGroup;
  groups(scalars, a, i, end, past, key, static_cast<std::uint32_t>(shard.first_index));
  if (end < shard.count) partial_group(groups, scalars, shard, end, shard.count - end, key);
  if (past.param || past.states) hwy::FlushStream();
}

template <class Rule, Dtype kGrad, Moments kMoments, Output kOutput>
GroupsFunction<typename Rule::Scalars> groups_for_place(const OptimizerShard& shard) {
  return shard.elsewhere() ? StepLoop<Rule, kGrad, kMoments, kOutput, Place::Elsewhere>::groups
                           : StepLoop<Rule, kGrad, kMoments, kOutput, Place::AsRead>::groups;
}

template <class Rule, Dtype kGrad, Moments kMoments>
GroupsFunction<typename Rule::Scalars> groups_for_output(const OptimizerShard& shard) {
  if constexpr (Rule::kHasVariance) {
    if (shard.rest != nullptr) {
      return groups_for_place<Rule, kGrad, kMoments, Output::Split>(shard);
    }
  }
  if (!shard.param || shard.param.type == Dtype::F32) {  // a copy in fp32 is made by walk()
    return groups_for_place<Rule, kGrad, kMoments, Output::None>(shard);
  }
  return shard.param.type == Dtype::BF16
             ? groups_for_place<Rule, kGrad, kMoments, Output::BF16>(shard)
             : groups_for_place<Rule, kGrad, kMoments, Output::F16>(shard);
}

/// The loop for the types of the shard.
template <class Rule, Moments kMoments>
GroupsFunction<typename Rule::Scalars> groups_for(const OptimizerShard& shard) {
  switch (shard.grad.type) {
    case Dtype::F32:
      return groups_for_output<Rule, Dtype::F32, kMoments>(shard);
    case Dtype::BF16:
      return groups_for_output<Rule, Dtype::BF16, kMoments>(shard);
    case Dtype::F16:
      return groups_for_output<Rule, Dtype::F16, kMoments>(shard);
  }
  return nullptr;
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "pagoda/base/thread_pool.h"
#include "pagoda/kernels/float_environment.h"
#include "pagoda/kernels/optimizer_shard.h"
#include "pagoda/kernels/rounding_counter.h"

/// What the optimizers' entry points share: checks, the cut at 2³² and the cut for threads. Not for
/// use outside kernels/.
namespace pagoda::kernels {

/// Elements that a thread takes at once: large enough to stream, a multiple of kNormBlock.
inline constexpr std::size_t kGrain = 65536;

enum class Needs : std::uint8_t { Nothing, Momentum, MomentumAndVariance };

/// Throws UserError unless the arrays are those that the optimizer needs, of types that exist.
void check_shard(const OptimizerShard& shard, const Step& step, Needs needs, bool may_split);

/// Throws UserError unless the value is finite and in [low, high).
void check_range(const char* name, double value, double low, double high);

/// check_range()'s bound for what may be any finite number.
inline constexpr double kHuge = std::numeric_limits<double>::max();

/// baseᵉ by squaring: std::pow may give other bits on another machine.
double power(double base, std::uint64_t exponent) noexcept;

/// fn(part, key) for each part of the shard whose indices share their upper half.
template <class Fn>
void with_rounding_keys(const OptimizerShard& shard, const Step& step, Fn&& fn) {
  for (std::size_t begin = 0; begin < shard.count;) {
    const std::uint64_t index = shard.first_index + begin;
    const std::uint64_t to_next = (std::uint64_t{1} << 32) - (index & 0xFFFFFFFFU);
    const std::size_t end = begin + std::min<std::uint64_t>(to_next, shard.count - begin);
    const auto high = static_cast<std::uint32_t>(index >> 32);
    fn(shard.part(begin, end), rounding_key(step.seed, step.number, high));
    begin = end;
  }
}

/// A step on this thread, with what `scalars_of` makes of its configuration.
template <class Config, class Scalars>
void step_with(Scalars (*scalars_of)(const Config&, const Step&),
               void (*kernel)(const Scalars&, const OptimizerShard&, RoundingKey),
               const Config& config, const Step& step, const OptimizerShard& shard) {
  const DefaultFloatEnvironment environment;
  const Scalars scalars = scalars_of(config, step);
  with_rounding_keys(shard, step, [&](const OptimizerShard& part, RoundingKey key) {
    kernel(scalars, part, key);
  });
}

/// fn(part) for pieces of the shard, on this thread and the pool's.
template <class Fn>
void for_pieces(const OptimizerShard& shard, ThreadPool& pool, Priority priority, Fn&& fn) {
  pool.parallel_for(
      0, shard.count, kGrain,
      [&](std::size_t begin, std::size_t end) { fn(shard.part(begin, end)); }, priority);
}

}  // namespace pagoda::kernels

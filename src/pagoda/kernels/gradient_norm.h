// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pagoda/base/thread_pool.h"
#include "pagoda/kernels/element.h"
#include "pagoda/kernels/isa.h"

namespace pagoda::kernels {

/// Sums of squares are defined over blocks of this many elements of a parameter's index space.
inline constexpr std::size_t kNormBlock = 4096;

constexpr std::size_t norm_blocks(std::size_t count) noexcept {
  return (count + kNormBlock - 1) / kNormBlock;
}

/// The sum of squares of each block, times scale², in double, for `count` elements that start at a
/// multiple of kNormBlock of the parameter's index space. `blocks` has norm_blocks(count) entries.
/// The bits depend on the elements and the scale only ("Sum of squares" in
/// docs/notes/numerics.md). Any thread.
void block_sums_of_squares(ConstElements values, std::size_t count, double scale,
                           std::span<double> blocks, Isa isa = active_isa());

/// The same on this thread and the pool's.
void block_sums_of_squares(ConstElements values, std::size_t count, double scale,
                           std::span<double> blocks, ThreadPool& pool,
                           Priority priority = Priority::Normal, Isa isa = active_isa());

/// start + blocks[0] + blocks[1] + …, in that order: ranks that hold consecutive shards pass the
/// sum on, and get what one rank would.
double add_in_order(std::span<const double> blocks, double start = 0) noexcept;

/// Both of the above: the sum of squares of a whole parameter.
double sum_of_squares(ConstElements values, std::size_t count, double scale = 1,
                      Isa isa = active_isa());

/// Whether no element is an infinity or a NaN. (A sum of squares says the same: in double no finite
/// gradient overflows it.)
bool all_finite(ConstElements values, std::size_t count, Isa isa = active_isa());

/// The same on this thread and the pool's.
bool all_finite(ConstElements values, std::size_t count, ThreadPool& pool,
                Priority priority = Priority::Normal, Isa isa = active_isa());

}  // namespace pagoda::kernels

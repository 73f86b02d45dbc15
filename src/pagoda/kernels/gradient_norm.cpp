// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/gradient_norm.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "pagoda/base/error.h"
#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/float_environment.h"
#include "pagoda/kernels/shard_driver.h"

namespace pagoda::kernels {

static_assert(kGrain % kNormBlock == 0, "threads must cut at blocks");

void block_sums_of_squares(ConstElements values, std::size_t count, double scale,
                           std::span<double> blocks, Isa isa) {
  PAGODA_REQUIRE_EQ(blocks.size(), norm_blocks(count), "one sum for each block");
  if (count == 0) return;
  const DefaultFloatEnvironment environment;
  kernels_for(isa).sum_squares(values, count, scale, blocks.data());
}

void block_sums_of_squares(ConstElements values, std::size_t count, double scale,
                           std::span<double> blocks, ThreadPool& pool, Priority priority, Isa isa) {
  PAGODA_REQUIRE_EQ(blocks.size(), norm_blocks(count), "one sum for each block");
  pool.parallel_for(
      0, count, kGrain,
      [&](std::size_t begin, std::size_t end) {
        block_sums_of_squares(values.from(begin), end - begin, scale,
                              blocks.subspan(begin / kNormBlock, norm_blocks(end - begin)), isa);
      },
      priority);
}

/// Not inlined, so that it stays behind its caller's DefaultFloatEnvironment.
[[gnu::noinline]] static double add_all(std::span<const double> blocks, double sum) noexcept {
  for (const double block : blocks) sum += block;
  return sum;
}

double add_in_order(std::span<const double> blocks, double start) noexcept {
  const DefaultFloatEnvironment environment;
  return add_all(blocks, start);
}

double sum_of_squares(ConstElements values, std::size_t count, double scale, Isa isa) {
  std::array<double, kGrain / kNormBlock> sums;
  double total = 0;
  for (std::size_t begin = 0; begin < count; begin += kGrain) {
    const std::size_t part = std::min(kGrain, count - begin);
    const auto blocks = std::span(sums).first(norm_blocks(part));
    block_sums_of_squares(values.from(begin), part, scale, blocks, isa);
    total = add_in_order(blocks, total);
  }
  return total;
}

bool all_finite(ConstElements values, std::size_t count, Isa isa) {
  return count == 0 || kernels_for(isa).all_finite(values, count);
}

bool all_finite(ConstElements values, std::size_t count, ThreadPool& pool, Priority priority,
                Isa isa) {
  std::atomic<bool> finite{true};
  pool.parallel_for(
      0, count, kGrain,
      [&](std::size_t begin, std::size_t end) {
        if (!finite.load(std::memory_order_relaxed)) return;
        if (!all_finite(values.from(begin), end - begin, isa)) finite.store(false);
      },
      priority);
  return finite.load();
}

}  // namespace pagoda::kernels

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/cast.h"

#include "pagoda/base/error.h"
#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/float_environment.h"
#include "pagoda/kernels/shard_driver.h"

namespace pagoda::kernels {

void cast(ConstElements from, Elements to, std::size_t count, Isa isa) {
  if (count == 0) return;
  PAGODA_REQUIRE(from && to, "a cast needs two arrays");
  const DefaultFloatEnvironment environment;
  kernels_for(isa).cast(from, to, count);
}

void cast(ConstElements from, Elements to, std::size_t count, ThreadPool& pool, Priority priority,
          Isa isa) {
  pool.parallel_for(
      0, count, kGrain,
      [&](std::size_t begin, std::size_t end) {
        cast(from.from(begin), to.from(begin), end - begin, isa);
      },
      priority);
}

}  // namespace pagoda::kernels

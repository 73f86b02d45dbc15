// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/master_split.h"

#include "pagoda/base/error.h"
#include "pagoda/kernels/dispatch.h"

namespace pagoda::kernels {

void split_masters(const float* master, Bf16* param, std::int16_t* rest, Elements variance,
                   std::size_t count, Isa isa) {
  PAGODA_REQUIRE(variance.type != Dtype::F16, "a second moment is fp32 or bf16");
  if (count > 0) kernels_for(isa).split(master, param, rest, variance, count);
}

void join_masters(const Bf16* param, const std::int16_t* rest, ConstElements variance,
                  float* master, std::size_t count, Isa isa) {
  PAGODA_REQUIRE(variance.type != Dtype::F16, "a second moment is fp32 or bf16");
  if (count > 0) kernels_for(isa).join(param, rest, variance, master, count);
}

}  // namespace pagoda::kernels

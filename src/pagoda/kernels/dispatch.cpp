// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/dispatch.h"

#include <algorithm>
#include <array>

#include "pagoda/base/error.h"
#include "pagoda/kernels/simd/tables.h"

namespace pagoda::kernels {

bool is_compiled(Isa isa) noexcept {
  return kAdam[static_cast<std::size_t>(isa)] != nullptr;
}

const KernelTable& kernels_for(Isa isa) {
  static const auto tables = [] {
    std::array<KernelTable, kIsaCount> all{};
    for (std::size_t i = 0; i < kIsaCount; ++i) {
      all[i] = {kAdam[i], kLion[i],       kSgd[i],       kCast[i], kSplit[i],
                kJoin[i], kSumSquares[i], kAllFinite[i], kProbe[i]};
    }
    return all;
  }();
  static const auto runs = [] {
    std::array<bool, kIsaCount> all{};
    for (const Isa each : supported_isas()) all[static_cast<std::size_t>(each)] = true;
    return all;
  }();
  PAGODA_REQUIRE(runs[static_cast<std::size_t>(isa)], "this processor cannot run {}",
                 isa_name(isa));
  return tables[static_cast<std::size_t>(isa)];
}

}  // namespace pagoda::kernels

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/isa.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "pagoda/base/error.h"
#include "pagoda/kernels/dispatch.h"

namespace pagoda::kernels {
namespace {

constexpr std::array<std::string_view, kIsaCount> kNames = {"scalar", "sse4", "avx2", "avx512"};

/// What the targets of simd/targets.h may emit. The compiler's own cpuid also asks the operating
/// system whether it saves the wide registers.
bool processor_has(Isa isa) noexcept {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::Scalar:
      return true;
    case Isa::Sse4:
      return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.2");
    case Isa::Avx2:
      return processor_has(Isa::Sse4) && __builtin_cpu_supports("avx2") &&
             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
             __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::Avx512:
      return processor_has(Isa::Avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bw");
  }
  return false;
#else
  return isa == Isa::Scalar;
#endif
}

std::vector<Isa> find_supported() {
  std::vector<Isa> found;
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    const auto isa = static_cast<Isa>(i);
    if (processor_has(isa) && is_compiled(isa)) found.push_back(isa);
  }
  return found;
}

Isa choose_active() {
  const char* wish = std::getenv("PAGODA_ISA");
  if (wish == nullptr || *wish == '\0') return best_isa();
  const Isa isa = parse_isa(wish);
  PAGODA_REQUIRE(std::ranges::count(supported_isas(), isa) > 0,
                 "PAGODA_ISA={} cannot run on this processor; the best it has is {}", wish,
                 isa_name(best_isa()));
  return isa;
}

}  // namespace

std::string_view isa_name(Isa isa) noexcept {
  return kNames[static_cast<std::size_t>(isa)];
}

Isa parse_isa(std::string_view name) {
  const auto found = std::ranges::find(kNames, name);
  PAGODA_REQUIRE(found != kNames.end(),
                 "'{}' is not an instruction set: scalar, sse4, avx2 or avx512", name);
  return static_cast<Isa>(found - kNames.begin());
}

std::span<const Isa> supported_isas() noexcept {
  static const std::vector<Isa> supported = find_supported();
  return supported;
}

Isa best_isa() noexcept {
  return supported_isas().back();
}

Isa active_isa() {
  static const Isa active = choose_active();
  return active;
}

}  // namespace pagoda::kernels

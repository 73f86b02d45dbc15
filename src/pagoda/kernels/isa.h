// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace pagoda::kernels {

/// The instruction sets every kernel is compiled for, worst to best. All give the same bits
/// (docs/notes/numerics.md); they differ in speed only.
enum class Isa : std::uint8_t {
  Scalar,  ///< what every x86-64 has
  Sse4,    ///< SSE4.2
  Avx2,    ///< AVX2 with F16C, BMI2 (and FMA, which is never used)
  Avx512,  ///< AVX-512 F, VL, DQ and BW
};

inline constexpr std::size_t kIsaCount = 4;

/// "scalar", "sse4", "avx2", "avx512".
std::string_view isa_name(Isa isa) noexcept;
/// The reverse. Throws UserError that lists the names.
Isa parse_isa(std::string_view name);

/// Those that this processor and this build can run, worst to best; never empty.
std::span<const Isa> supported_isas() noexcept;
/// The last of supported_isas().
Isa best_isa() noexcept;

/// What kernels run on unless told otherwise: best_isa(), or what the environment variable
/// PAGODA_ISA names (read once). Throws UserError where that is unknown or not supported here.
Isa active_isa();

}  // namespace pagoda::kernels

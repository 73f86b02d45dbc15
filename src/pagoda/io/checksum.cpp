// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/checksum.h"

namespace pagoda::io {
namespace {

struct Build {
  std::uint64_t (*hash)(const void*, std::size_t) noexcept;
  std::string_view name;
};

Build best_build() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {checksum_builds::avx512, "avx512"};
  if (__builtin_cpu_supports("avx2")) return {checksum_builds::avx2, "avx2"};
#endif
  return {checksum_builds::sse2, "sse2"};
}

const Build& build() noexcept {
  static const Build chosen = best_build();
  return chosen;
}

}  // namespace

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  return build().hash(bytes.data(), bytes.size());
}

std::string_view checksum_target() noexcept {
  return build().name;
}

}  // namespace pagoda::io

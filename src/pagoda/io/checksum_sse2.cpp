// SPDX-License-Identifier: Apache-2.0
// Compiled with the flags of its instruction set (CMakeLists.txt). Nothing else may be included
// here: an inline function built with them could be the copy that the linker keeps for everyone.
#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace pagoda::io::checksum_builds {

std::uint64_t sse2(const void* data, std::size_t length) noexcept;

std::uint64_t sse2(const void* data, std::size_t length) noexcept {
  return XXH3_64bits(data, length);
}

}  // namespace pagoda::io::checksum_builds

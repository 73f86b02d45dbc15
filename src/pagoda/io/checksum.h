// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace pagoda::io {

/// XXH3, 64 bits: the same on every machine, computed with the widest vectors this one has. Any
/// thread may call it.
std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;

/// Which vectors checksum() uses here: "sse2", "avx2" or "avx512".
std::string_view checksum_target() noexcept;

/// One build of the hash per instruction set. Call only those that the machine has; checksum()
/// chooses. Public for the test that holds their bits equal.
namespace checksum_builds {
std::uint64_t sse2(const void* data, std::size_t length) noexcept;
std::uint64_t avx2(const void* data, std::size_t length) noexcept;
std::uint64_t avx512(const void* data, std::size_t length) noexcept;
}  // namespace checksum_builds

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/bytes.h"

namespace pagoda::plan {

/// What one kind of buffers may be, where the user does not say.
struct BufferRange {
  Bytes least = 0;  ///< both are powers of two
  Bytes most = 0;
};

/// Buffers of one kind take at most one part in so many of their budget, if the least ones do.
inline constexpr Bytes kBufferShare = 8;

/// The size of each of `count` buffers: the largest power of two of the range with which all of
/// them take no more than their share of `budget`.
Bytes buffer_size(Bytes budget, Bytes count, BufferRange range) noexcept;

}  // namespace pagoda::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace pagoda::pager {

/// A seam for tests: a wait that the pager leaves out, so that the ordering checker has something
/// to find.
enum class DroppedWait : std::uint8_t {
  None,
  Room,   ///< a fetch does not wait for the former user of the bytes that it fills
  Ready,  ///< an operator does not wait for the copy that fills its page
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pagoda/base/bytes.h"
#include "pagoda/pager/page.h"

namespace pagoda::pager {

/// The other ranks' shards, read one-sidedly. Any fetch thread may call it.
class RemoteShards {
 public:
  struct Piece {
    int rank = 0;
    Bytes begin = 0;  // in the page
    std::span<std::byte> to;
  };
  virtual ~RemoteShards() = default;
  /// Fills every piece with `page`'s bytes as of `version`. Throws what the other rank did.
  virtual void pull(PageId page, std::uint64_t version, std::span<const Piece> pieces) = 0;
};

}  // namespace pagoda::pager

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "pagoda/base/bytes.h"

namespace pagoda::io {

/// The grid that transfers are cut on. All are powers of two but the stripe, a multiple of `cell`.
struct Grid {
  Bytes cell;   ///< no request is longer, none crosses a multiple of it
  Bytes block;  ///< what is read or written only whole: the checksum's block, or the disk's
  Bytes align;  ///< offsets and lengths in the file; 1 through the page cache
};

/// A part of a transfer that is one request, or one read, change and write.
struct Cut {
  Bytes begin;        ///< the bytes asked for: [begin, end) of the space
  Bytes end;          ///< …
  Bytes cover_begin;  ///< the whole blocks that hold them, up to the extent's own end
  Bytes cover_end;    ///< …; the request is this, rounded up to Grid::align

  bool partial() const noexcept { return begin != cover_begin || end != cover_end; }
  Bytes length() const noexcept { return end - begin; }
  Bytes cover_length() const noexcept { return cover_end - cover_begin; }
};

/// Appends the cuts of [begin, end), within the extent [extent_begin, extent_end), to `cuts`.
///
/// Whole blocks are kept together up to a cell; a block that is asked for in part, or that ends
/// unaligned with its extent, is a cut of its own, so that only it goes through a bounce buffer.
void cut_range(const Grid& grid, Bytes extent_begin, Bytes extent_end, Bytes begin, Bytes end,
               std::vector<Cut>& cuts);

}  // namespace pagoda::io

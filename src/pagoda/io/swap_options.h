// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "pagoda/base/bytes.h"
#include "pagoda/io/engine.h"
#include "pagoda/io/swap_file.h"

namespace pagoda::io {

class FaultPlan;

/// How a swap space is laid out and worked. Immutable once the space is made.
struct SwapOptions {
  /// One file in each; stripes go round them. Different disks make it faster.
  std::vector<std::filesystem::path> directories;
  /// Bytes of all extents together, rounded up to a page.
  Bytes capacity = 0;
  /// Consecutive bytes in one file before the next one's turn. A multiple of io_bytes.
  Bytes stripe_bytes = 1_MiB;
  /// The longest request given to the kernel. A power of two from 4 KiB on.
  Bytes io_bytes = 1_MiB;

  Direct direct = Direct::Auto;
  Preallocate preallocate = Preallocate::Reserve;

  /// Verify what comes back from the disk. Nine bytes of memory a block.
  bool checksums = true;
  /// Bytes under one checksum: a power of two from 4 KiB to io_bytes. A transfer of part of a block
  /// moves all of it.
  Bytes checksum_block = 64_KiB;

  EngineChoice engine = EngineChoice::Auto;
  /// Requests with the kernel at a time, for each ring.
  unsigned depth = 32;
  /// Rings, each with a thread, for each directory. Reads are verified on that thread: take a
  /// second one where a directory reads faster than one core hashes (about 10 GB/s).
  unsigned rings = 1;
  /// Buffers of io_bytes for unaligned memory and ends, of the whole space.
  unsigned bounce_buffers = 8;

  /// For tests: what shall go wrong below the space. Null: nothing.
  std::shared_ptr<FaultPlan> faults;
};

}  // namespace pagoda::io

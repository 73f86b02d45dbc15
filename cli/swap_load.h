// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "disk_load.h"
#include "pagoda/base/aligned_buffer.h"
#include "pagoda/io/swap_space.h"

namespace pagoda::cli {

/// A swap space under load: one thread, registered buffers, the next block from each completion.
class SwapLoad {
 public:
  struct Options {
    Bytes size = 0;
    Bytes block = 1_MiB;
    unsigned depth = 16;  ///< for each directory
    io::EngineChoice engine = io::EngineChoice::Auto;
    bool checksums = true;
    AlignedBuffer::Pages pages = AlignedBuffer::Pages::Huge;
  };

  /// Writes all of it once: reads find data, writes are overwrites.
  SwapLoad(const std::vector<std::filesystem::path>& directories, const Options& options);

  /// Bytes a second, both directions together.
  double run(DiskLoad::Kind kind, double seconds) { return run(kind, seconds, 0); }

  std::string_view engine_name() const { return space_.engine_name(); }
  bool direct() const { return space_.direct(); }
  bool registered() const { return registered_.registered(); }

 private:
  static io::SwapOptions swap_options(const std::vector<std::filesystem::path>& directories,
                                      const Options& options);
  /// For `seconds`, and at least `least` blocks.
  double run(DiskLoad::Kind kind, double seconds, std::uint64_t least);
  io::Transfer start(DiskLoad::Kind kind, std::uint64_t turn, std::span<std::byte> memory,
                     io::TransferCallback callback);

  Budget budget_;
  io::SwapSpace space_;
  io::Extent extent_;
  Bytes block_;
  std::uint64_t blocks_;
  std::size_t slots_;
  AlignedBuffer memory_;
  io::RegisteredBuffer registered_;
};

}  // namespace pagoda::cli

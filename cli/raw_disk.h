// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <vector>

#include "disk_load.h"
#include "pagoda/io/swap_file.h"

namespace pagoda::cli {

/// The limit where fio is not installed: as many threads as the depth, each in a plain loop of
/// pread and pwrite on direct files without a name. Used by one thread.
class RawDisk final : public DiskLimit {
 public:
  /// Writes `size` bytes in all.
  RawDisk(const std::vector<std::filesystem::path>& directories, Bytes size);

  std::string name() const override { return "pread/pwrite by threads, O_DIRECT"; }
  double run(const DiskLoad& load) override;

 private:
  std::vector<io::SwapFile> files_;
};

}  // namespace pagoda::cli

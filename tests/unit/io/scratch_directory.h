// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <unistd.h>

#include "pagoda/base/error.h"

namespace pagoda::io {

/// A directory of a test's own, gone with it. Under TMPDIR, or /tmp.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "pagoda-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw EngineError("no scratch directory: " + name);
    path_ = name;
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }

  /// `count` directories in it, as if they were disks.
  std::vector<std::filesystem::path> disks(std::size_t count) const {
    std::vector<std::filesystem::path> made;
    for (std::size_t i = 0; i < count; ++i) {
      made.push_back(path_ / ("disk" + std::to_string(i)));
      std::filesystem::create_directory(made.back());
    }
    return made;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace pagoda::io

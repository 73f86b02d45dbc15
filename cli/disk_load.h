// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "pagoda/base/bytes.h"

namespace pagoda::cli {

/// What a bench asks of a disk: of us and of the limit alike.
struct DiskLoad {
  enum class Kind { Read, Write, Mixed };
  Kind kind = Kind::Read;
  Bytes block = 1_MiB;
  unsigned depth = 16;  ///< for each directory
  double seconds = 1;
};

/// Something that shows how fast the disk can be driven, on files of its own.
class DiskLimit {
 public:
  DiskLimit() = default;
  DiskLimit(const DiskLimit&) = delete;
  DiskLimit& operator=(const DiskLimit&) = delete;
  virtual ~DiskLimit() = default;

  virtual std::string name() const = 0;
  /// Bytes a second, both directions together.
  virtual double run(const DiskLoad& load) = 0;
};

}  // namespace pagoda::cli

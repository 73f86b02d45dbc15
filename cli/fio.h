// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "disk_load.h"
#include "pagoda/base/bytes.h"

namespace pagoda::cli {

/// fio (io_uring, O_DIRECT, registered files and buffers, one job) on files of its own, one in each
/// directory, laid out before the first measurement and removed with this object, on Ctrl-C too.
/// One at a time, used by one thread.
class Fio final : public DiskLimit {
 public:
  /// Whether the program is on the PATH.
  static bool present();

  /// Writes `size` bytes in all. EngineError with fio's words when it cannot.
  Fio(const std::vector<std::filesystem::path>& directories, Bytes size);
  ~Fio() override;

  std::string name() const override { return "fio, io_uring, O_DIRECT"; }
  double run(const DiskLoad& load) override;

 private:
  std::string files_;  // as fio reads them: separated by colons
  std::size_t count_;
  Bytes size_;
};

}  // namespace pagoda::cli

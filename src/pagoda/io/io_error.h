// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <source_location>
#include <string>

#include "pagoda/base/bytes.h"
#include "pagoda/base/error.h"

namespace pagoda::io {

/// A transfer that the machine did not carry out: where it was and what the kernel said.
class IoError : public EngineError {
 public:
  /// `what` as in "read failed"; the errno's own text is added.
  IoError(std::string what, std::string path, Bytes offset, Bytes length, int error_number,
          std::source_location where = std::source_location::current());

  /// The file; one without a name reads "directory/#inode".
  const std::string& path() const noexcept { return path_; }
  /// Bytes from the start of that file.
  Bytes offset() const noexcept { return offset_; }
  Bytes length() const noexcept { return length_; }
  int error_number() const noexcept { return error_number_; }

 private:
  std::string path_;
  Bytes offset_;
  Bytes length_;
  int error_number_;
};

/// Bytes came back from the disk other than they were written. error_number() is EBADMSG.
class ChecksumError : public IoError {
 public:
  ChecksumError(std::string path, Bytes offset, Bytes length, std::uint64_t expected,
                std::uint64_t actual, std::source_location where = std::source_location::current());

  std::uint64_t expected() const noexcept { return expected_; }
  std::uint64_t actual() const noexcept { return actual_; }

 private:
  std::uint64_t expected_;
  std::uint64_t actual_;
};

/// "EIO: Input/output error".
std::string errno_text(int error_number);

}  // namespace pagoda::io

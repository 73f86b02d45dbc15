// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/io_error.h"

#include <cerrno>
#include <cstring>
#include <utility>

namespace pagoda::io {

std::string errno_text(int error_number) {
  const char* name = ::strerrorname_np(error_number);
  const char* text = ::strerrordesc_np(error_number);
  return fmt::format("{}: {}", name != nullptr ? name : fmt::format("errno {}", error_number),
                     text != nullptr ? text : "unknown error");
}

IoError::IoError(std::string what, std::string path, Bytes offset, Bytes length, int error_number,
                 std::source_location where)
    : EngineError(fmt::format("{}: {}", what, errno_text(error_number)),
                  {context("path", path), context("offset", offset), context("length", length),
                   context("errno", error_number)},
                  where),
      path_(std::move(path)),
      offset_(offset),
      length_(length),
      error_number_(error_number) {}

ChecksumError::ChecksumError(std::string path, Bytes offset, Bytes length, std::uint64_t expected,
                             std::uint64_t actual, std::source_location where)
    : IoError("the disk gave back other bytes than were written (checksum)", std::move(path),
              offset, length, EBADMSG, where),
      expected_(expected),
      actual_(actual) {
  add_context(context("expected", fmt::format("{:016x}", expected)));
  add_context(context("actual", fmt::format("{:016x}", actual)));
}

}  // namespace pagoda::io

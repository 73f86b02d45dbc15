// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/bytes.h"

namespace pagoda::device {

/// Bytes that an operation reads or writes, told to the ordering checker with the operation.
struct Use {
  enum class How { Reads, Writes };

  How how;
  const void* data;
  Bytes bytes;

  static Use reads(const void* data, Bytes bytes) { return {How::Reads, data, bytes}; }
  static Use writes(const void* data, Bytes bytes) { return {How::Writes, data, bytes}; }
};

}  // namespace pagoda::device

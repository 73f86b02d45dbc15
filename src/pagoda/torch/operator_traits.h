// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace at {
struct RecordFunction;
}

namespace pagoda::torch {

/// What the observer needs to know of an operator, learnt once from its schema.
struct OperatorTraits {
  /// It reads no bytes of its inputs (a view, empty_like), or is made of operators that are
  /// announced themselves, or brings its pages in by itself (list_operators.h).
  bool needs_no_data = false;
  /// It looks at the pointers of its inputs before it calls the operators it is made of: recurrent
  /// layers with cuDNN. Their pages are all needed at once.
  bool reads_pointers_on_gpu = false;
  /// It reads the rows of its first argument that its second one names, and no other bytes of it.
  bool looks_up = false;
  /// Bit i: it writes to argument i; arguments from 63 on share the last bit.
  std::uint64_t writes = 0;

  bool writes_argument(std::size_t index) const noexcept {
    return ((writes >> (index < 63 ? index : 63)) & 1U) != 0;
  }
};

/// The traits of the operator that is about to run. Any thread; a few nanoseconds once it is known.
const OperatorTraits& operator_traits(const at::RecordFunction& function);

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "pagoda/base/bytes.h"
#include "pagoda/kernels/element.h"

namespace pagoda::optim {

/// How master and moments of a page lie in its state home: chunk after chunk, each with all of its
/// arrays side by side, so that one update is one read and one write.
struct StateLayout {
  enum class Master : std::uint8_t {
    Parameter,  ///< the fp32 parameter is the master: nothing is kept
    Whole,      ///< fp32, four bytes
    Split,      ///< the rest of a bf16 parameter, two bytes
  };

  Master master = Master::Parameter;
  bool momentum = true;
  bool variance = true;
  kernels::Dtype moments = kernels::Dtype::F32;
  /// Elements a chunk; a multiple of 4096.
  std::uint64_t chunk = 1U << 20;

  /// Arrays start at multiples of this in a chunk: what vector kernels like.
  static constexpr Bytes kAlignment = 64;

  struct Offsets {
    Bytes master = 0;
    Bytes momentum = 0;
    Bytes variance = 0;
    Bytes end = 0;
  };

  /// Where the arrays of a chunk of `count` elements lie in it.
  constexpr Offsets offsets(std::uint64_t count) const noexcept {
    const Bytes masters = master == Master::Whole ? 4 : master == Master::Split ? 2 : 0;
    const Bytes moment = kernels::element_size(moments);
    Offsets out;
    out.momentum = align_up(count * masters, kAlignment);
    out.variance = out.momentum + align_up(momentum ? count * moment : 0, kAlignment);
    out.end = out.variance + align_up(variance ? count * moment : 0, kAlignment);
    return out;
  }

  /// Bytes of state that an element has.
  constexpr Bytes element_bytes() const noexcept { return offsets(kAlignment).end / kAlignment; }

  constexpr std::uint64_t chunks(std::uint64_t elements) const noexcept {
    return (elements + chunk - 1) / chunk;
  }
  constexpr std::uint64_t count(std::uint64_t elements, std::uint64_t index) const noexcept {
    return std::min(chunk, elements - index * chunk);
  }
  /// Where chunk `index` starts in the home.
  constexpr Bytes begin(std::uint64_t index) const noexcept { return index * offsets(chunk).end; }
  /// Bytes of the whole home.
  constexpr Bytes bytes(std::uint64_t elements) const noexcept {
    if (elements == 0) return 0;
    const std::uint64_t last = chunks(elements) - 1;
    return begin(last) + offsets(count(elements, last)).end;
  }
};

}  // namespace pagoda::optim

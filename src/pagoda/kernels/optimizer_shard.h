// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagoda/kernels/element.h"

namespace pagoda {
class ThreadPool;
}

namespace pagoda::kernels {

/// Where weight decay acts.
enum class Decay : std::uint8_t {
  Decoupled,  ///< on the parameter: p *= 1 − lr·decay (AdamW)
  L2,         ///< on the gradient: g += decay·p (Adam)
};

/// What one optimizer step fixes for every parameter.
struct Step {
  std::uint64_t number = 1;  ///< 1 for the first: bias correction and the rounding counter
  /// Multiplies every gradient first: the inverse loss scale times the clipping factor. A negative
  /// one ascends.
  double grad_scale = 1;
  /// Of the stochastic rounding of bf16 moments. Differs between parameters, or they share their
  /// rounding noise.
  std::uint64_t seed = 0;
};

/// Elements [first_index, first_index + count) of one parameter with all its states.
///
/// Pointers only, owned by the caller. No two arrays overlap, those in `to` included, but for one
/// pair: the parameter may be written to where the gradient is, in elements of the same size. The
/// index matters for stochastic rounding alone: every cut of a parameter into shards gives the same
/// bits.
/// Arrays need the alignment of their elements; 64 bytes and equal offsets are fastest.
struct OptimizerShard {
  std::uint64_t first_index = 0;
  std::size_t count = 0;
  ConstElements grad;
  /// The fp32 master, read and written: a copy beside `param`, or the fp32 parameter itself (then
  /// `param` is null). Null where the master is split.
  float* master = nullptr;
  /// Split master (master_split.h): `param` is bf16 and read too, this is its rest.
  std::int16_t* rest = nullptr;
  /// The parameter, written in its type; null when the master is the parameter.
  Elements param;
  /// First moment, momentum: fp32, or bf16 stochastically rounded. Zero before step 1.
  Elements momentum;
  /// Second moment, of the same type as `momentum`; with a split master its sign bits are ties.
  Elements variance;

  /// Where the states are written, if not where they are read: all of them or none. Apart from
  /// them, a parameter that is read (`master` without a `param`, or `param` with a `rest`) may be
  /// written elsewhere.
  struct Written {
    float* master = nullptr;
    std::int16_t* rest = nullptr;
    Elements param;
    Elements momentum;
    Elements variance;
  };
  /// Nothing set: in place. Else what was read stays as it was, and a step is taken back by
  /// forgetting what it wrote. The bits are the same, and so is the memory traffic of long shards
  /// whose arrays start cache lines together.
  Written to;

  bool elsewhere() const noexcept { return states_elsewhere() || to.master != nullptr || to.param; }
  /// The states, not only the parameter.
  bool states_elsewhere() const noexcept {
    return (to.master != nullptr && param) || to.rest != nullptr || to.momentum || to.variance;
  }
  /// Where everything is written, elsewhere or in place.
  Written written() const noexcept {
    return {to.master != nullptr ? to.master : master, to.rest != nullptr ? to.rest : rest,
            to.param ? to.param : param, to.momentum ? to.momentum : momentum,
            to.variance ? to.variance : variance};
  }

  /// Elements [begin, end) of this shard.
  OptimizerShard part(std::size_t begin, std::size_t end) const noexcept {
    OptimizerShard out = *this;
    out.first_index = first_index + begin;
    out.count = end - begin;
    out.grad = grad.from(begin);
    const auto from = [begin](auto* array) { return array == nullptr ? array : array + begin; };
    out.master = from(master);
    out.rest = from(rest);
    out.param = param.from(begin);
    out.momentum = momentum.from(begin);
    out.variance = variance.from(begin);
    out.to.master = from(to.master);
    out.to.rest = from(to.rest);
    out.to.param = to.param.from(begin);
    out.to.momentum = to.momentum.from(begin);
    out.to.variance = to.variance.from(begin);
    return out;
  }
};

}  // namespace pagoda::kernels

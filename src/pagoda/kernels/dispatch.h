// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagoda/kernels/element.h"
#include "pagoda/kernels/isa.h"
#include "pagoda/kernels/optimizer_shard.h"
#include "pagoda/kernels/rounding_counter.h"

/// What lies between the public functions and simd/: the scalars of a step, rounded to fp32 once,
/// and one table of functions per instruction set. Not for use outside kernels/.
namespace pagoda::kernels {

struct AdamScalars {
  float grad_scale;
  float l2;            // weight decay on the gradient; used where has_l2
  float keep;          // 1 − lr·weight_decay where decoupled, else 1
  float beta1, rest1;  // β₁ and 1 − β₁
  float beta2, rest2;
  float step_size;  // lr ÷ (1 − β₁ᵗ)
  float unbias2;    // 1 ÷ √(1 − β₂ᵗ)
  float eps;
  bool has_l2;
};

struct LionScalars {
  float grad_scale;
  float keep;
  float lr;
  float beta1, rest1;
  float beta2, rest2;
};

struct SgdScalars {
  float grad_scale;
  float l2;
  float keep;
  float lr;
  float momentum;   // what multiplies the old buffer: 0 at step 1
  float input;      // what multiplies the gradient: 1 − dampening, 1 at step 1
  float lookahead;  // nesterov's momentum
  bool has_l2;
  bool nesterov;
};

/// The streams of a BandwidthProbe run, 4-byte ones first within each kind.
struct ProbeJob {
  static constexpr std::size_t kMax = 4;
  const std::byte* read[kMax] = {};
  std::byte* update[kMax] = {};
  std::byte* write[kMax] = {};
  int read4 = 0, read2 = 0, update4 = 0, update2 = 0, write4 = 0, write2 = 0;
  std::size_t count = 0;  // elements of each
  bool prefetch = false;
  bool stream = false;
};

/// The kernels of one instruction set. Every function may be called from any thread and expects the
/// default float environment.
struct KernelTable {
  void (*adam)(const AdamScalars&, const OptimizerShard&, RoundingKey);
  void (*lion)(const LionScalars&, const OptimizerShard&, RoundingKey);
  void (*sgd)(const SgdScalars&, const OptimizerShard&, RoundingKey);
  void (*cast)(ConstElements, Elements, std::size_t);
  void (*split)(const float*, Bf16*, std::int16_t*, Elements, std::size_t);
  void (*join)(const Bf16*, const std::int16_t*, ConstElements, float*, std::size_t);
  void (*sum_squares)(ConstElements, std::size_t, double, double*);
  bool (*all_finite)(ConstElements, std::size_t);
  bool (*probe)(const ProbeJob&);
};

/// The table of an instruction set in supported_isas(); throws UserError for another.
const KernelTable& kernels_for(Isa isa);

/// Whether this build holds code for it (which processors can run is another question).
bool is_compiled(Isa isa) noexcept;

}  // namespace pagoda::kernels

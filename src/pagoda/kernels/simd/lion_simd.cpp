// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/lion_simd.cpp"
#include <hwy/foreach_target.h>

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/simd/step-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

struct LionRule {
  using Scalars = LionScalars;
  static constexpr bool kHasVariance = false;
  VF grad_scale, keep, lr, beta1, rest1, beta2, rest2;

  explicit HWY_INLINE LionRule(const LionScalars& s)
      : grad_scale(hn::Set(kF, s.grad_scale)),
        keep(hn::Set(kF, s.keep)),
        lr(hn::Set(kF, s.lr)),
        beta1(hn::Set(kF, s.beta1)),
        rest1(hn::Set(kF, s.rest1)),
        beta2(hn::Set(kF, s.beta2)),
        rest2(hn::Set(kF, s.rest2)) {}

  HWY_INLINE void operator()(VF g, VF& p, VF& m, VF& /*v*/) const {
    g = hn::Mul(g, grad_scale);
    p = hn::Mul(p, keep);
    const VF direction = hn::Add(hn::Mul(beta1, m), hn::Mul(rest1, g));
    // ±lr, but 0 for 0 and NaN for NaN: neither is greater than 0 in size.
    const auto moves = hn::Gt(hn::Abs(direction), hn::Zero(kF));
    const VF change = hn::IfThenElse(moves, hn::CopySign(lr, direction), direction);
    p = hn::Sub(p, change);
    m = without_denormals(hn::Add(hn::Mul(beta2, m), hn::Mul(rest2, g)));
    if (HWY_UNLIKELY(any_nan(p) || any_nan(m))) {
      p = one_nan(p);
      m = one_nan(m);
    }
  }
};

void lion(const LionScalars& scalars, const OptimizerShard& shard, RoundingKey key) {
  walk(shard.momentum.type == Dtype::F32 ? groups_for<LionRule, Moments::F32>(shard)
                                         : groups_for<LionRule, Moments::BF16>(shard),
       scalars, shard, key);
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::lion) kLion[kIsaCount] = PAGODA_PER_ISA(lion);
}
#endif

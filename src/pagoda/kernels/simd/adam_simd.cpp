// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/adam_simd.cpp"
#include <hwy/foreach_target.h>

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/simd/step-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

struct AdamRule {
  using Scalars = AdamScalars;
  static constexpr bool kHasVariance = true;
  VF grad_scale, l2, keep, beta1, rest1, beta2, rest2, step_size, unbias2, eps;
  bool has_l2;

  explicit HWY_INLINE AdamRule(const AdamScalars& s)
      : grad_scale(hn::Set(kF, s.grad_scale)),
        l2(hn::Set(kF, s.l2)),
        keep(hn::Set(kF, s.keep)),
        beta1(hn::Set(kF, s.beta1)),
        rest1(hn::Set(kF, s.rest1)),
        beta2(hn::Set(kF, s.beta2)),
        rest2(hn::Set(kF, s.rest2)),
        step_size(hn::Set(kF, s.step_size)),
        unbias2(hn::Set(kF, s.unbias2)),
        eps(hn::Set(kF, s.eps)),
        has_l2(s.has_l2) {}

  HWY_INLINE void operator()(VF g, VF& p, VF& m, VF& v) const {
    g = hn::Mul(g, grad_scale);
    if (has_l2) g = hn::Add(g, hn::Mul(l2, p));
    p = hn::Mul(p, keep);
    m = without_denormals(hn::Add(hn::Mul(beta1, m), hn::Mul(rest1, g)));
    v = hn::Add(hn::Mul(beta2, v), hn::Mul(rest2, hn::Mul(g, g)));
    const VF divisor = hn::Add(hn::Mul(hn::Sqrt(v), unbias2), eps);
    p = hn::Sub(p, hn::Div(hn::Mul(step_size, m), divisor));
    if (HWY_UNLIKELY(any_nan(p))) {  // a NaN in m or v always reaches p
      p = one_nan(p);
      m = one_nan(m);
      v = one_nan(v);
    }
  }
};

void adam(const AdamScalars& scalars, const OptimizerShard& shard, RoundingKey key) {
  walk(shard.momentum.type == Dtype::F32 ? groups_for<AdamRule, Moments::F32>(shard)
                                         : groups_for<AdamRule, Moments::BF16>(shard),
       scalars, shard, key);
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::adam) kAdam[kIsaCount] = PAGODA_PER_ISA(adam);
}
#endif

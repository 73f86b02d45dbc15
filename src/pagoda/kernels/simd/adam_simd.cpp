// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/adam_simd.cpp"
#include "hwy/foreach_target.h"

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/simd/step-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

struct AdamRule {
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
    m = one_nan_or_normal(hn::Add(hn::Mul(beta1, m), hn::Mul(rest1, g)));
    v = one_nan(hn::Add(hn::Mul(beta2, v), hn::Mul(rest2, hn::Mul(g, g))));
    const VF divisor = hn::Add(hn::Mul(hn::Sqrt(v), unbias2), eps);
    p = one_nan(hn::Sub(p, hn::Div(hn::Mul(step_size, m), divisor)));
  }
};

void adam(const AdamScalars& scalars, const OptimizerSlice& slice, RoundingKey key) {
  const AdamRule rule(scalars);
  const bool split = slice.rest != nullptr;
  if (slice.momentum.type == Dtype::F32) {
    return split ? run_for_grad<AdamRule, Moments::F32, true>(rule, slice, key)
                 : run_for_grad<AdamRule, Moments::F32, false>(rule, slice, key);
  }
  return split ? run_for_grad<AdamRule, Moments::BF16, true>(rule, slice, key)
               : run_for_grad<AdamRule, Moments::BF16, false>(rule, slice, key);
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::adam) kAdam[kIsaCount] = PAGODA_PER_ISA(adam);
}
#endif

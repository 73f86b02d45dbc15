// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/sgd_simd.cpp"
#include "hwy/foreach_target.h"

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/simd/step-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

template <bool kMomentum>
struct SgdRule {
  static constexpr bool kHasVariance = false;
  VF grad_scale, l2, keep, lr, momentum, input, lookahead;
  bool has_l2, nesterov;

  explicit HWY_INLINE SgdRule(const SgdScalars& s)
      : grad_scale(hn::Set(kF, s.grad_scale)),
        l2(hn::Set(kF, s.l2)),
        keep(hn::Set(kF, s.keep)),
        lr(hn::Set(kF, s.lr)),
        momentum(hn::Set(kF, s.momentum)),
        input(hn::Set(kF, s.input)),
        lookahead(hn::Set(kF, s.lookahead)),
        has_l2(s.has_l2),
        nesterov(s.nesterov) {}

  HWY_INLINE void operator()(VF g, VF& p, VF& m, VF& /*v*/) const {
    g = hn::Mul(g, grad_scale);
    if (has_l2) g = hn::Add(g, hn::Mul(l2, p));
    p = hn::Mul(p, keep);
    if constexpr (kMomentum) {
      m = one_nan_or_normal(hn::Add(hn::Mul(momentum, m), hn::Mul(input, g)));
      g = nesterov ? hn::Add(g, hn::Mul(lookahead, m)) : m;
    }
    p = one_nan(hn::Sub(p, hn::Mul(lr, g)));
  }
};

void sgd(const SgdScalars& scalars, const OptimizerSlice& slice, RoundingKey key) {
  if (!slice.momentum) {
    return run_for_grad<SgdRule<false>, Moments::None, false>(SgdRule<false>(scalars), slice, key);
  }
  const SgdRule<true> rule(scalars);
  return slice.momentum.type == Dtype::F32
             ? run_for_grad<SgdRule<true>, Moments::F32, false>(rule, slice, key)
             : run_for_grad<SgdRule<true>, Moments::BF16, false>(rule, slice, key);
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::sgd) kSgd[kIsaCount] = PAGODA_PER_ISA(sgd);
}
#endif

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/sgd_simd.cpp"
#include <hwy/foreach_target.h>

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/simd/step-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

template <bool kMomentum>
struct SgdRule {
  using Scalars = SgdScalars;
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
      m = without_denormals(hn::Add(hn::Mul(momentum, m), hn::Mul(input, g)));
      g = nesterov ? hn::Add(g, hn::Mul(lookahead, m)) : m;
    }
    p = hn::Sub(p, hn::Mul(lr, g));
    if (HWY_UNLIKELY(any_nan(p) || any_nan(m))) {
      p = one_nan(p);
      m = one_nan(m);
    }
  }
};

void sgd(const SgdScalars& scalars, const OptimizerShard& shard, RoundingKey key) {
  if (!shard.momentum) {
    return walk(groups_for<SgdRule<false>, Moments::None>(shard), scalars, shard, key);
  }
  walk(shard.momentum.type == Dtype::F32 ? groups_for<SgdRule<true>, Moments::F32>(shard)
                                         : groups_for<SgdRule<true>, Moments::BF16>(shard),
       scalars, shard, key);
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::sgd) kSgd[kIsaCount] = PAGODA_PER_ISA(sgd);
}
#endif

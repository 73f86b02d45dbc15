// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pagoda/kernels/simd/probe_simd.cpp"
#include <hwy/foreach_target.h>

#include "pagoda/kernels/dispatch.h"
#include "pagoda/kernels/simd/lanes-inl.h"
#include "pagoda/kernels/simd/tables.h"

HWY_BEFORE_NAMESPACE();
namespace pagoda::kernels {
namespace HWY_NAMESPACE {

constexpr std::size_t kProbeAhead = 512;  // elements

/// Reads, rewrites and writes a group of each stream and computes nothing. `nothing` is zero, which
/// the compiler does not know: it would drop a store of what was just loaded.
template <int kRead4, int kRead2, int kUpdate4, int kUpdate2, int kWrite4, int kWrite2,
          bool kPrefetch, bool kStream>
void probe_loop(const ProbeJob& job) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t step = hn::Lanes(d);
  volatile std::uint8_t zero = 0;
  const auto nothing = hn::Set(d, zero);
  auto seen = hn::Zero(d);
  const auto bytes = [](const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); };
  const auto out_bytes = [](std::byte* p) { return reinterpret_cast<std::uint8_t*>(p); };

  for (std::size_t i = 0; i + kGroup <= job.count; i += kGroup) {
#pragma GCC unroll 8
    for (int s = 0; s < kRead4 + kRead2; ++s) {
      const std::size_t width = s < kRead4 ? 4 : 2;
      const std::uint8_t* at = bytes(job.read[s]) + i * width;
      for (std::size_t b = 0; b < kGroup * width; b += step) {
        if (kPrefetch && b % 64 == 0) hwy::Prefetch(at + kProbeAhead * width + b);
        seen = hn::Or(seen, hn::LoadU(d, at + b));
      }
    }
#pragma GCC unroll 8
    for (int s = 0; s < kUpdate4 + kUpdate2; ++s) {
      const std::size_t width = s < kUpdate4 ? 4 : 2;
      std::uint8_t* at = out_bytes(job.update[s]) + i * width;
      for (std::size_t b = 0; b < kGroup * width; b += step) {
        if (kPrefetch && b % 64 == 0) hwy::Prefetch(at + kProbeAhead * width + b);
        hn::StoreU(hn::Or(hn::LoadU(d, at + b), nothing), d, at + b);
      }
    }
#pragma GCC unroll 8
    for (int s = 0; s < kWrite4 + kWrite2; ++s) {
      const std::size_t width = s < kWrite4 ? 4 : 2;
      std::uint8_t* at = out_bytes(job.write[s]) + i * width;
      for (std::size_t b = 0; b < kGroup * width; b += step) {
        if constexpr (kStream) {
          hn::Stream(nothing, d, at + b);
        } else {
          hn::StoreU(nothing, d, at + b);
        }
      }
    }
  }
  if (kStream) hwy::FlushStream();
  volatile bool sink = hn::AllTrue(d, hn::Eq(seen, nothing));
  static_cast<void>(sink);
}

/// Runs the loop if the job has just these numbers of streams.
template <int kRead4, int kRead2, int kUpdate4, int kUpdate2, int kWrite4, int kWrite2>
bool probe_if(const ProbeJob& job) {
  if (job.read4 != kRead4 || job.read2 != kRead2 || job.update4 != kUpdate4 ||
      job.update2 != kUpdate2 || job.write4 != kWrite4 || job.write2 != kWrite2) {
    return false;
  }
  constexpr bool kWrites = kWrite4 + kWrite2 > 0;
  if (job.stream && kWrites) {
    job.prefetch
        ? probe_loop<kRead4, kRead2, kUpdate4, kUpdate2, kWrite4, kWrite2, true, true>(job)
        : probe_loop<kRead4, kRead2, kUpdate4, kUpdate2, kWrite4, kWrite2, false, true>(job);
  } else {
    job.prefetch
        ? probe_loop<kRead4, kRead2, kUpdate4, kUpdate2, kWrite4, kWrite2, true, false>(job)
        : probe_loop<kRead4, kRead2, kUpdate4, kUpdate2, kWrite4, kWrite2, false, false>(job);
  }
  return true;
}

/// One line for each set of streams that a kernel has.
bool probe(const ProbeJob& job) {
  return probe_if<1, 0, 3, 0, 0, 0>(job) ||  // adam fp32
         probe_if<1, 0, 3, 0, 0, 1>(job) ||  // fp32, 16-bit parameter
         probe_if<0, 1, 3, 0, 0, 1>(job) ||  // 16-bit gradient and parameter
         probe_if<0, 1, 2, 2, 0, 0>(job) ||  // … split master
         probe_if<0, 1, 1, 2, 0, 1>(job) ||  // … bf16 moments
         probe_if<0, 1, 0, 4, 0, 0>(job) ||  // … both
         probe_if<3, 1, 0, 0, 3, 1>(job) ||  // 16-bit gradient and parameter, states elsewhere
         probe_if<0, 4, 0, 1, 0, 3>(job) ||  // … split master and bf16 moments, elsewhere
         probe_if<0, 1, 2, 0, 0, 1>(job) ||  // lion, sgd with momentum
         probe_if<1, 0, 0, 0, 0, 1>(job) ||  // narrowing cast
         probe_if<0, 1, 0, 0, 1, 0>(job) ||  // widening cast
         probe_if<1, 0, 0, 0, 0, 0>(job) ||  // norm of fp32
         probe_if<0, 1, 0, 0, 0, 0>(job);    // norm of 16 bits
}

}  // namespace HWY_NAMESPACE
}  // namespace pagoda::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pagoda::kernels {
const decltype(KernelTable::probe) kProbe[kIsaCount] = PAGODA_PER_ISA(probe);
}
#endif

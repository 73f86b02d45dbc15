// SPDX-License-Identifier: Apache-2.0
// Which targets of Highway are compiled: included first by every source in this folder, before
// hwy/foreach_target.h. isa.cpp knows what a processor must have to run each.
#pragma once

// Scalar is compiled too; it is the baseline that runs anywhere.
#define HWY_COMPILE_ALL_ATTAINABLE
// SSSE3 would serve processors older than 2008, and carry-less multiplication nothing here. Under
// sanitizers two targets must do: the loops are the same templates and compile four times as long.
#ifdef PAGODA_FEWER_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS HWY_SSSE3
#endif
#define HWY_DISABLE_PCLMUL_AES
// Highway's own assertions would call into its library, which we do not link.
#define HWY_IS_DEBUG_BUILD 0

// The functions named `function` of all targets, worst to best as in Isa; null where a target is
// not compiled. Highway's own table would need its library.
#define PAGODA_PER_ISA(function)                                                         \
  {                                                                                      \
    HWY_CHOOSE_FALLBACK(function), HWY_CHOOSE_SSE4(function), HWY_CHOOSE_AVX2(function), \
        HWY_CHOOSE_AVX3(function)                                                        \
  }

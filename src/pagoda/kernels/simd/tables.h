// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/kernels/dispatch.h"

/// What the sources in this folder hand to dispatch.cpp: each kernel once per instruction set, in
/// the order of Isa, null where that one was not compiled.
namespace pagoda::kernels {

extern const decltype(KernelTable::adam) kAdam[kIsaCount];
extern const decltype(KernelTable::lion) kLion[kIsaCount];
extern const decltype(KernelTable::sgd) kSgd[kIsaCount];
extern const decltype(KernelTable::cast) kCast[kIsaCount];
extern const decltype(KernelTable::split) kSplit[kIsaCount];
extern const decltype(KernelTable::join) kJoin[kIsaCount];
extern const decltype(KernelTable::sum_squares) kSumSquares[kIsaCount];
extern const decltype(KernelTable::all_finite) kAllFinite[kIsaCount];
extern const decltype(KernelTable::probe) kProbe[kIsaCount];

}  // namespace pagoda::kernels

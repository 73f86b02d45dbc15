// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace pagoda::torch {

/// tolist(), and with it print() and repr(), of a page on the CPU.
///
/// They read by a raw pointer, which a page does not give away, but call `resolve_neg` first, on
/// the tensor that Python has. A kernel in its place hands them a copy of what they are about to
/// read. numpy() does so with a tensor that it has made, and gets no copy: what is written to the
/// array, or by the next step() to the parameter, would not be seen on the other side. Inside an
/// operator that has the page the kernel is torch's.
namespace value_lists {

/// Puts the kernel in place, once; it stays. Any thread.
void install();

}  // namespace value_lists

}  // namespace pagoda::torch

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/DeviceType.h>

namespace pagoda::torch {

/// Operators over lists whose pages need not all be on the device at once: `_foreach_*`, `cat` and
/// `stack`. The observer leaves their pages alone; what runs in their place brings them in.
///
/// - On the CPU `_foreach_*` calls an operator for each tensor, and `stack` calls `cat`: nothing is
///   to be done.
/// - On a GPU `_foreach_*` has kernels over whole lists. A kernel in front of each cuts the lists
///   into parts whose pages fit and calls it for every part.
/// - `cat` copies tensor by tensor where its pages do not fit.
///
/// Without a page among their tensors all of them go straight to torch's kernels.
/// docs/notes/paging.md, "Lists".
namespace list_operators {

/// Puts the kernels for tensors on this kind of device in place, once; they stay. Before operators
/// run on pages there.
void install(c10::DeviceType device);
/// The part of it that is about `_foreach_*`, for every such operator: how a GPU does it can be
/// tried on the CPU.
void cut_foreach(c10::DeviceType device);

}  // namespace list_operators

}  // namespace pagoda::torch

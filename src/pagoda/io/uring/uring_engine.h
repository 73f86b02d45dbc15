// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "pagoda/io/engine.h"

namespace pagoda::io {

/// An engine on one io_uring, driven by one thread that sleeps while there is nothing to do.
///
/// That thread alone touches the ring: it submits in batches, refills the queue before it hands out
/// completions, and so lets the kernel defer its work to it (SINGLE_ISSUER, DEFER_TASKRUN; kernels
/// before 6.1 do without). Were requests submitted by their callers, those punted to the kernel's
/// workers would be cancelled when a caller's thread ends. Files are registered; buffers given to
/// add_buffer() are too, as long as the kernel and RLIMIT_MEMLOCK allow it.
///
/// Null, with the errno in `refused`, where the kernel or the container does not allow io_uring.
std::unique_ptr<Engine> make_uring_engine(const Engine::Options& options, int& refused);

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "pagoda/io/engine.h"

namespace pagoda::io {

/// The reference and the fallback: a fixed set of threads that call pread and pwrite.
///
/// As many threads as the depth asks for, at most kMaxPosixThreads: a thread is in the kernel for
/// the whole of a request, so their number is the queue depth.
std::unique_ptr<Engine> make_posix_engine(const Engine::Options& options);

inline constexpr unsigned kMaxPosixThreads = 16;

}  // namespace pagoda::io

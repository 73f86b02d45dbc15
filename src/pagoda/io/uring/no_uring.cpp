// SPDX-License-Identifier: Apache-2.0
// Stands in for uring_engine.cpp where liburing is not there at build time.
#include <cerrno>

#include "pagoda/io/uring/uring_engine.h"

namespace pagoda::io {

std::unique_ptr<Engine> make_uring_engine(const Engine::Options&, int& refused) {
  refused = ENOSYS;
  return nullptr;
}

}  // namespace pagoda::io

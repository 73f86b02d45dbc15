// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/sigpipe.h"

#include <cerrno>
#include <ctime>

namespace pagoda::comm {
namespace {

sigset_t only_sigpipe() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGPIPE);
  return set;
}

bool is_pending() {
  sigset_t pending;
  return ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

NoSigpipe::NoSigpipe() : pending_before_(is_pending()) {
  const sigset_t set = only_sigpipe();
  ::pthread_sigmask(SIG_BLOCK, &set, &mask_before_);
}

NoSigpipe::~NoSigpipe() {
  const int error = errno;  // of what was called meanwhile, which its caller may still look at
  if (!pending_before_ && is_pending()) {
    const sigset_t set = only_sigpipe();
    const timespec at_once{};
    while (::sigtimedwait(&set, nullptr, &at_once) < 0 && errno == EINTR) {
    }
  }
  ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  errno = error;
}

}  // namespace pagoda::comm

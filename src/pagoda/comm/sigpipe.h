// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

namespace pagoda::comm {

/// While this lives, a write of the calling thread to a connection that the other side has closed
/// fails with EPIPE and does nothing else: the signal that comes with it, whose default is to end
/// the process without a word, is held back and taken. Threads started meanwhile never get it from
/// their writes at all. What the rest of the process does about SIGPIPE stays as it is.
///
/// Around libraries that write to sockets without MSG_NOSIGNAL. Destroy it on the same thread.
class NoSigpipe {
 public:
  NoSigpipe();
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;
  ~NoSigpipe();

 private:
  sigset_t mask_before_;
  bool pending_before_;  // somebody else's: not ours to take
};

}  // namespace pagoda::comm

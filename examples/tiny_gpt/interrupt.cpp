// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <csignal>

#include <unistd.h>

#include "progress.h"

namespace tiny_gpt {
namespace {

volatile std::sig_atomic_t signalled = 0;

void on_signal(int signal) {
  if (signalled != 0) {
    Progress::restore_cursor();
    _exit(128 + signal);
  }
  signalled = 1;
}

}  // namespace

void watch_for_interrupts() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

bool interrupted() noexcept {
  return signalled != 0;
}

}  // namespace tiny_gpt

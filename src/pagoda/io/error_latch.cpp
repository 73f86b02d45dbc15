// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/error_latch.h"

#include <utility>

#include "pagoda/base/log.h"

namespace pagoda::io {
namespace {

void log_error(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    log::error("io", "a transfer that nobody waited for failed", {{"error", caught.what()}});
  } catch (...) {
    log::error("io", "a transfer that nobody waited for failed");
  }
}

}  // namespace

ErrorLatch::~ErrorLatch() {
  if (error_ != nullptr) log_error(error_);
}

void ErrorLatch::set(std::exception_ptr error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) {
      error_ = std::move(error);
      return;
    }
  }
  log_error(error);
}

void ErrorLatch::raise() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace pagoda::kernels {

/// While it lives, this thread's arithmetic is IEEE's default: round to nearest even, denormals
/// kept, no traps. Afterwards it is what it was, exception flags included.
///
/// Every kernel holds one, so that a caller's mode (torch.set_flush_denormal, an inherited MXCSR)
/// cannot change bits (docs/notes/numerics.md). Lives and dies on one thread.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__x86_64__)
  DefaultFloatEnvironment() noexcept : saved_(_mm_getcsr()) {
    _mm_setcsr(kDefault);
  }
  ~DefaultFloatEnvironment() {
    _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kDefault = 0x1F80;  // all exceptions masked, nothing else set
  unsigned saved_;
#else
  DefaultFloatEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() {
    std::fesetenv(&saved_);
  }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace pagoda::kernels

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pagoda/base/error.h"

namespace pagoda {

/// The machine has no memory left for something: nothing has changed, and whoever asked for it may
/// ask again for less.
class OutOfMemory : public EngineError {
 public:
  using EngineError::EngineError;
};

}  // namespace pagoda

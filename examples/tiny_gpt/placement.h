// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "flags.h"
#include "pagoda/engine/config.h"

namespace tiny_gpt {

/// Everything on disk, and less device memory than a quarter of the model.
pagoda::Config paged(const Flags& flags);

/// Everything on the device, as without an engine.
pagoda::Config resident(const Flags& flags);

}  // namespace tiny_gpt

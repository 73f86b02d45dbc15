// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace pagoda::torch {

/// The torch this library was compiled against, for example "2.11.0".
std::string built_version();

/// The torch that is loaded; any thread. A library that differs from built_version() in more than
/// its last number is not supported: layouts that we rely on may have changed.
std::string loaded_version();

}  // namespace pagoda::torch

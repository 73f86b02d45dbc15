// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace pagoda {

/// Which process this is, in a text that other processes of the machine can tell its end by: its
/// number, when it started, and whose numbers these are. Another one after a fork.
std::string process_mark();

/// Whether the process with that mark has ended. False also where that cannot be seen from here: on
/// another machine, or in another container.
bool process_has_ended(const std::string& mark);

}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tiny_gpt {

/// From now on the first SIGINT or SIGTERM makes interrupted() true, a second one ends the program.
void watch_for_interrupts();
bool interrupted() noexcept;

}  // namespace tiny_gpt

// SPDX-License-Identifier: Apache-2.0
// Programs of random operators over random parameters. Includes no torch.
#pragma once

#include <cstdint>
#include <string>

namespace zoo {

/// Runs the program that `seed` makes, with and without an engine whose budget and placement are
/// drawn as well; empty if losses and parameters have the same bits, else what differs.
std::string fuzz(std::uint64_t seed);

}  // namespace zoo

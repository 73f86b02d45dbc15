// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pagoda {

/// How many letters must be added, left out, replaced or exchanged with their neighbour to make one
/// word of the other.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// Of `words`, what was probably meant by `word`: the one with the least distance, if that is at
/// most a third of its letters (but one is always forgiven).
std::optional<std::string> nearest_word(std::string_view word,
                                        const std::vector<std::string>& words);

}  // namespace pagoda

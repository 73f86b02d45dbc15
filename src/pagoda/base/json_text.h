// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace pagoda {

/// `text` as a JSON string literal, quotes included.
std::string json_text(std::string_view text);

}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/torch_version.h"

#include <ATen/Version.h>
#include <torch/headeronly/version.h>

namespace pagoda::torch {

std::string built_version() {
  return TORCH_VERSION;
}

std::string loaded_version() {
  // The only place where the library says its own version is its configuration's text.
  const std::string text = at::show_config();
  constexpr std::string_view kKey = "TORCH_VERSION=";
  const auto key = text.find(kKey);
  if (key == std::string::npos) return "unknown";
  const auto begin = key + kKey.size();
  return text.substr(begin, text.find_first_of(", \n", begin) - begin);
}

}  // namespace pagoda::torch

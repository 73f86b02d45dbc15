// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <ATen/core/Dict.h>

#include "pagoda/optim/optimizer.h"

namespace pagoda::torch {

/// Constants of an optimizer by their names, as Python gives them: "lr", "beta1", …; a truth is 0
/// or 1.
using Constants = c10::Dict<std::string, double>;

/// The rule that is called `kind`, with these constants and its defaults for the rest. UserError
/// where there is no such rule, or it has no such constant.
Optimizer rule_of(const std::string& kind, const Constants& constants);
/// What rule_of() takes: what the rule has when nothing is said.
Constants constants_of(const std::string& kind);

}  // namespace pagoda::torch

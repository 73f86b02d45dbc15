// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/engine/config.h"

namespace pagoda {

/// What a value is in JSON. A size or a loss scale may be written either way; JSON has no number
/// for infinity, which is the text "inf".
enum class JsonForm { Number, NumberOrInf, Bool, Text, NumberOrText, List };

/// One key of Config: what it takes, what it means, and how it is read and printed.
struct ConfigField {
  std::string name;
  std::string type;  ///< completes "expected …"
  std::string help;
  JsonForm form;
  /// Sets it from text; a text that is not allowed throws a UserError that says why, or nothing
  /// where `type` says it.
  std::function<void(Config&, std::string_view)> parse;
  /// The value as parse() takes it.
  std::function<std::string(const Config&)> print;
  bool expert = false;  ///< nobody has to know it
};

/// THE table, in the order of Config's fields. May be called from any thread.
const std::vector<ConfigField>& config_fields();

/// The field of that name, or a UserError that names the nearest one. The old name of a field is
/// told once.
const ConfigField& config_field(std::string_view name);

/// parse(), with errors that name the key, the value and what is allowed. A value that is no number
/// and neither true nor false is shown in quotes.
void set_field(Config& config, const ConfigField& field, std::string_view text);

/// The same for a value that is to be shown as `shown`.
void set_field(Config& config, const ConfigField& field, std::string_view text,
               std::string_view shown);

/// Throws such an error: "zero = 7 is not allowed: expected an integer from 0 to 3". `instead`:
/// what may have been meant.
[[noreturn]] void refuse_value(const ConfigField& field, std::string_view shown,
                               std::string_view reason = {}, std::string_view instead = {});

}  // namespace pagoda

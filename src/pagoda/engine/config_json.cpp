// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include "pagoda/base/error.h"
#include "pagoda/base/json_text.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/config_field.h"

namespace pagoda {
namespace {

using nlohmann::json;

/// Parses an object; a key that is there twice would otherwise lose its first value silently.
json parse_object(std::string_view text) {
  std::set<std::string> seen;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 &&
        !seen.insert(parsed.get<std::string>()).second) {
      throw UserError(fmt::format("the key '{}' appears twice", parsed.get<std::string>()));
    }
    return true;
  };
  json root;
  try {
    root = json::parse(text, watch);
  } catch (const json::exception& error) {
    throw UserError(fmt::format("the configuration is not JSON: {}", error.what()));
  }
  PAGODA_REQUIRE(root.is_object(), "the configuration is not a JSON object");
  return root;
}

/// As a message has it: numbers as they are, strings in quotes.
std::string shown(const json& value) {
  return value.is_string() ? fmt::format("'{}'", value.get<std::string>()) : value.dump();
}

/// A text; the system would read one with a NUL only up to there.
std::string read_text(const ConfigField& field, const json& value) {
  std::string text = value.get<std::string>();
  if (text.find('\0') == std::string::npos) return text;
  refuse_value(field, value.dump(), "it has a NUL character in it");
}

std::vector<std::string> read_list(const ConfigField& field, const json& value) {
  if (value.is_string()) return {read_text(field, value)};
  std::vector<std::string> items;
  for (const json& item : value) {
    if (!item.is_string()) refuse_value(field, shown(value));
    items.push_back(read_text(field, item));
  }
  return items;
}

/// Whether a value may be of this type in JSON.
bool has_form(const json& value, JsonForm form) {
  switch (form) {
    case JsonForm::Number:
      return value.is_number();
    case JsonForm::NumberOrInf:
      return value.is_number() || value == "inf";
    case JsonForm::Bool:
      return value.is_boolean();
    case JsonForm::Text:
      return value.is_string();
    case JsonForm::NumberOrText:
      return value.is_number() || value.is_string();
    case JsonForm::List:
      return value.is_array() || value.is_string();
  }
  return false;
}

void read(Config& config, const ConfigField& field, const json& value) {
  if (value.is_null()) return;
  if (value.is_string()) (void)read_text(field, value);  // whatever the key takes
  if (!has_form(value, field.form)) {
    refuse_value(field, shown(value), value.is_string() ? "it is a string" : "");
  }
  if (field.form == JsonForm::List) {
    // Not through its text: a directory may have a comma in its name here.
    config.nvme = read_list(field, value);
    return;
  }
  constexpr double kMost = 18446744073709551616.0;  // JSON makes such whole numbers floating ones
  if (field.type.starts_with("a byte size") && value.is_number_float() &&
      std::abs(value.get<double>()) >= kMost) {
    refuse_value(field, fmt::format("{:.0f}", value.get<double>()),
                 "it is more than 64 bits can count");
  }
  set_field(config, field, value.is_string() ? read_text(field, value) : value.dump(),
            shown(value));
}

std::string write(const Config& config, const ConfigField& field) {
  if (field.form == JsonForm::List) {
    std::vector<std::string> items;
    for (const std::string& item : config.nvme) items.push_back(json_text(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
  const std::string text = field.print(config);
  const bool bare = field.form == JsonForm::Number || field.form == JsonForm::Bool ||
                    (field.form == JsonForm::NumberOrInf && text != "inf");
  return bare ? text : json_text(text);
}

}  // namespace

Config Config::from_json(std::string_view text) {
  Config config;
  const json root = parse_object(text);
  std::set<const ConfigField*> given;
  for (const auto& [key, value] : root.items()) {
    const ConfigField& field = config_field(key);
    PAGODA_REQUIRE(given.insert(&field).second,
                   "the key '{}' is there by its old name, too: give one of them", field.name);
    read(config, field, value);
  }
  return config;
}

Config Config::from_json_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    throw UserError(fmt::format("the configuration '{}' cannot be read", path.string()));
  }
  try {
    return from_json(text.str());
  } catch (UserError& error) {
    error.add_context(context("file", path.string()));
    throw;
  }
}

std::string Config::to_json() const {
  std::vector<std::string> lines;
  for (const ConfigField& field : config_fields()) {
    lines.push_back(fmt::format("  {}: {}", json_text(field.name), write(*this, field)));
  }
  return fmt::format("{{\n{}\n}}\n", fmt::join(lines, ",\n"));
}

}  // namespace pagoda

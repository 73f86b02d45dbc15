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
      throw UserError(fmt::format("the key '{}' is there twice", parsed.get<std::string>()));
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

[[noreturn]] void reject(const ConfigField& field, const json& value, const char* form) {
  throw UserError(fmt::format("{} = {} is not allowed: it must be {}; it takes {}", field.name,
                              value.dump(), form, field.type));
}

/// A text; the system would read one with a NUL only up to there.
std::string read_text(const ConfigField& field, const json& value) {
  std::string text = value.get<std::string>();
  if (text.find('\0') == std::string::npos) return text;
  throw UserError(fmt::format("{} = {} has a NUL character in it", field.name, value.dump()));
}

std::vector<std::string> read_list(const ConfigField& field, const json& value) {
  if (value.is_string()) return {read_text(field, value)};
  if (!value.is_array()) reject(field, value, "a list of texts, or one text");
  std::vector<std::string> items;
  for (const json& item : value) {
    if (!item.is_string()) reject(field, value, "a list of texts");
    items.push_back(read_text(field, item));
  }
  return items;
}

void read(Config& config, const ConfigField& field, const json& value) {
  if (value.is_null()) return;
  switch (field.form) {
    case JsonForm::List:
      // Not through its text: a directory may have a comma in its name here.
      config.nvme = read_list(field, value);
      return;
    case JsonForm::Number:
      if (!value.is_number()) reject(field, value, "a number");
      break;
    case JsonForm::Bool:
      if (!value.is_boolean()) reject(field, value, "true or false");
      break;
    case JsonForm::Text:
      if (!value.is_string()) reject(field, value, "a text");
      break;
    case JsonForm::NumberOrText:
      if (!value.is_number() && !value.is_string()) reject(field, value, "a number or a text");
      break;
  }
  constexpr double kMost = 18446744073709551616.0;  // JSON makes such whole numbers floating ones
  if (field.type.starts_with("bytes") && value.is_number_float() &&
      std::abs(value.get<double>()) >= kMost) {
    throw UserError(fmt::format("{} = {:.0f} is not allowed: it is more than 64 bits can count",
                                field.name, value.get<double>()));
  }
  set_field(config, field, value.is_string() ? read_text(field, value) : value.dump());
}

std::string write(const Config& config, const ConfigField& field) {
  if (field.form == JsonForm::List) {
    std::vector<std::string> items;
    for (const std::string& item : config.nvme) items.push_back(json_text(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
  const std::string text = field.print(config);
  const bool bare = field.form == JsonForm::Number || field.form == JsonForm::Bool;
  return bare ? text : json_text(text);
}

}  // namespace

Config Config::from_json(std::string_view text) {
  Config config;
  const json root = parse_object(text);
  for (const auto& [key, value] : root.items()) read(config, config_field(key), value);
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

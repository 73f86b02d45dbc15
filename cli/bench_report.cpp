// SPDX-License-Identifier: Apache-2.0
#include "bench_report.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "pagoda/base/json_text.h"

namespace pagoda::cli {
namespace {

using Cells = std::array<std::string, 6>;

/// Three significant digits or more, never an exponent: 0.423, 12.3, 1831.
std::string number(double value) {
  const double size = value < 0 ? -value : value;
  return fmt::format("{:.{}f}", value, size < 1 ? 3 : size < 10 ? 2 : size < 100 ? 1 : 0);
}

/// Characters as a terminal counts them: UTF-8 continuation bytes take no column.
std::size_t columns(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string padded(const std::string& text, std::size_t width, bool right) {
  const std::string space(width - columns(text), ' ');
  return right ? space + text : text + space;
}

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

std::string BenchReport::table() const {
  std::vector<Cells> lines = {{"", "measured", "unit", "limit", "ratio", "limit is"}};
  for (const BenchRow& row : rows_) {
    const bool has_limit = row.limit > 0;
    lines.push_back({row.name, number(row.value), row.unit, has_limit ? number(row.limit) : "–",
                     has_limit ? fmt::format("{:.1f} %", 100 * row.ratio()) : "–", row.limit_name});
  }
  std::array<std::size_t, 6> widths{};
  for (const Cells& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], columns(line[i]));
    }
  }
  std::string out = title_ + "\n";
  for (const Cells& line : lines) {
    std::string text;
    for (std::size_t i = 0; i < line.size(); ++i) {
      const bool right = i == 1 || i == 3 || i == 4;
      text += "  " + padded(line[i], widths[i], right);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  }
  for (const std::string& sentence : notes_) out += "  " + sentence + "\n";
  return out;
}

std::string BenchReport::json() const {
  std::string out = R"({"rows":[)";
  for (const BenchRow& row : rows_) {
    if (&row != &rows_.front()) out += ',';
    const bool has_limit = row.limit > 0;
    out +=
        fmt::format(R"({{"name":{},"value":{},"unit":{},"limit":{},"limit_name":{},"ratio":{}}})",
                    json_text(row.name), row.value, json_text(row.unit),
                    has_limit ? fmt::format("{}", row.limit) : "null", json_text(row.limit_name),
                    has_limit ? fmt::format("{}", row.ratio()) : "null");
  }
  return out + "]}";
}

}  // namespace pagoda::cli

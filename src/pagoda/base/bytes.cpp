// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/bytes.h"

#include <array>
#include <cctype>
#include <limits>

#include <fmt/format.h>

#include "pagoda/base/error.h"

namespace pagoda {
namespace {

__extension__ using Wide = unsigned __int128;  // holds any 64-bit value times any unit

constexpr std::string_view kPrefixes = "KMGTP";

[[noreturn]] void reject(std::string_view text, std::string_view why) {
  throw UserError(fmt::format(
      "'{}' is not a byte size: {} (write it like 8GiB, 512M, 1.5GB or 4096)", text, why));
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())))
    text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
    text.remove_suffix(1);
  return text;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// The factor of a unit such as "", "B", "k", "MiB", "GB"; 0 if there is no such unit.
Wide unit_factor(std::string_view unit) {
  if (unit.empty() || unit == "B" || unit == "b") return 1;
  const auto prefix =
      kPrefixes.find(static_cast<char>(std::toupper(static_cast<unsigned char>(unit[0]))));
  if (prefix == std::string_view::npos) return 0;
  std::string rest;
  for (char c : unit.substr(1))
    rest += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  Wide base = 0;
  if (rest.empty() || rest == "i" || rest == "ib") base = 1024;
  if (rest == "b") base = 1000;
  Wide factor = base == 0 ? 0 : 1;
  for (std::size_t i = 0; i <= prefix; ++i) factor *= base;
  return factor;
}

}  // namespace

Bytes parse_bytes(std::string_view text) {
  const std::string_view body = trim(text);
  if (body.empty()) reject(text, "it is empty");

  // The number is digits ÷ 10^decimals; 19 digits always fit and more would be nonsense.
  Wide digits = 0;
  Wide scale = 1;
  std::size_t seen = 0;
  std::size_t i = 0;
  bool point = false;
  for (; i < body.size() && (is_digit(body[i]) || (body[i] == '.' && !point)); ++i) {
    if (body[i] == '.') {
      point = true;
      continue;
    }
    if (digits != 0 || body[i] != '0') ++seen;
    if (seen > 20) reject(text, "it has too many digits");
    digits = digits * 10 + static_cast<unsigned>(body[i] - '0');
    if (point) {
      scale *= 10;
      if (scale > Wide{1'000'000'000'000}) reject(text, "it has too many decimals");
    }
  }
  if (i == 0 || (i == 1 && point)) reject(text, "it does not start with a number");
  if (!is_digit(body[i - 1])) reject(text, "the number ends with a point");

  const std::string_view unit = trim(body.substr(i));
  const Wide factor = unit_factor(unit);
  if (factor == 0) reject(text, fmt::format("unknown unit '{}'", unit));
  if (factor == 1 && point) reject(text, "a fraction of a byte");

  // digits < 10^20 and factor ≤ 2^50: the product fits in 128 bits.
  const Wide value = digits * factor / scale;
  if (value > std::numeric_limits<Bytes>::max()) reject(text, "it is more than 64 bits can count");
  return static_cast<Bytes>(value);
}

namespace {

/// The largest unit that fits into `bytes`, which has at least one of the smallest.
std::size_t largest_prefix(Bytes bytes, Bytes& unit) {
  std::size_t prefix = 0;
  unit = 1024;
  while (prefix + 1 < kPrefixes.size() && bytes / unit >= 1024) {
    unit *= 1024;
    ++prefix;
  }
  return prefix;
}

}  // namespace

std::string format_bytes(Bytes bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  Bytes unit = 0;
  const std::size_t prefix = largest_prefix(bytes, unit);
  if (bytes % unit == 0) return fmt::format("{} {}iB", bytes / unit, kPrefixes[prefix]);
  return fmt::format("{:.2f} {}iB", static_cast<double>(bytes) / static_cast<double>(unit),
                     kPrefixes[prefix]);
}

std::string format_bytes_up(Bytes bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  Bytes unit = 0;
  const std::size_t prefix = largest_prefix(bytes, unit);
  const auto hundredths = static_cast<Bytes>((Wide{bytes} * 100 + unit - 1) / unit);
  if (hundredths % 100 == 0) return fmt::format("{} {}iB", hundredths / 100, kPrefixes[prefix]);
  return fmt::format("{}.{:02} {}iB", hundredths / 100, hundredths % 100, kPrefixes[prefix]);
}

}  // namespace pagoda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>

#include <fmt/format.h>

/// Structured logging: a component, a fixed sentence, and fields that a machine can pick out.
///
///   log::info("io", "engine chosen", {{"engine", "uring"}, {"depth", 64}});
///
/// prints `12:01:07.123 info  io: engine chosen engine=uring depth=64` to standard error, or one
/// JSON object a line with PAGODA_LOG_FORMAT=json. PAGODA_LOG names the lowest level shown (trace,
/// debug, info, warn, error, off; default warn). All functions may be called from any thread.
namespace pagoda::log {

enum class Level { Trace, Debug, Info, Warn, Error, Off };

/// One key and its value, already printed.
struct Field {
  std::string key;
  std::string value;
  bool quoted;  // the value is a text, not a number or truth value

  template <class T>
  Field(std::string_view field_key, const T& field_value)
      : key(field_key), value(fmt::format("{}", field_value)), quoted(!std::is_arithmetic_v<T>) {}
};
using Fields = std::initializer_list<Field>;

bool enabled(Level level) noexcept;
void set_level(Level level) noexcept;
Level level() noexcept;
/// "debug" → Level::Debug; anything unknown is a UserError that lists the names.
Level parse_level(std::string_view name);

void write(Level level, std::string_view component, std::string_view message, Fields fields = {});

inline void debug(std::string_view component, std::string_view message, Fields fields = {}) {
  write(Level::Debug, component, message, fields);
}
inline void info(std::string_view component, std::string_view message, Fields fields = {}) {
  write(Level::Info, component, message, fields);
}
inline void warn(std::string_view component, std::string_view message, Fields fields = {}) {
  write(Level::Warn, component, message, fields);
}
inline void error(std::string_view component, std::string_view message, Fields fields = {}) {
  write(Level::Error, component, message, fields);
}

/// While it lives, every line goes to `sink` (without time) instead of standard error, whatever the
/// level. For tests; one at a time.
class Capture {
 public:
  using Sink = std::function<void(Level, const std::string& line)>;
  explicit Capture(Sink sink);
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture();
};

}  // namespace pagoda::log

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace pagoda {

/// One fact that helps to understand an error: what was being read, how large it was, …
struct ErrorContext {
  std::string key;
  std::string value;
};

/// Makes an ErrorContext of anything that fmt can print.
template <class T>
ErrorContext context(std::string_view key, const T& value) {
  return {std::string(key), fmt::format("{}", value)};
}

/// The root of everything Pagoda throws. `what()` reads "message [key=value, …]"; where it was
/// thrown is of no use to a user.
/// Never thrown itself: an error is the caller's (UserError) or the engine's (EngineError).
class Error : public std::exception {
 public:
  const char* what() const noexcept override { return text_.c_str(); }
  const std::string& message() const noexcept { return message_; }
  const std::vector<ErrorContext>& contexts() const noexcept { return contexts_; }
  const std::source_location& where() const noexcept { return where_; }
  /// what(), with the place in our sources: for the log.
  std::string located() const;

  /// Adds what a frame further up knows, before it rethrows.
  void add_context(ErrorContext item);

 protected:
  Error(std::string message, std::vector<ErrorContext> contexts, std::source_location where);

 private:
  void compose();

  std::string message_;
  std::vector<ErrorContext> contexts_;
  std::source_location where_;
  std::string text_;
};

/// The caller asked for something that cannot be: a wrong argument, a budget that is too small, a
/// directory that is not there. The message says what to change.
class UserError : public Error {
 public:
  explicit UserError(std::string message, std::vector<ErrorContext> contexts = {},
                     std::source_location where = std::source_location::current())
      : Error(std::move(message), std::move(contexts), where) {}
};

/// The engine or the machine under it failed: a disk error, a broken invariant, a lost rank.
class EngineError : public Error {
 public:
  explicit EngineError(std::string message, std::vector<ErrorContext> contexts = {},
                       std::source_location where = std::source_location::current())
      : Error(std::move(message), std::move(contexts), where) {}
};

namespace detail {

template <class T>
std::string printable(const T& value) {
  if constexpr (fmt::is_formattable<T>::value) {
    return fmt::format("{}", value);
  } else {
    return "<unprintable>";
  }
}

inline std::string check_detail() {
  return {};
}

template <class... Args>
std::string check_detail(fmt::format_string<Args...> format, Args&&... args) {
  return fmt::format(format, std::forward<Args>(args)...);
}

/// Out of line, so that a check costs its caller one compare and one jump.
template <class E>
[[noreturn]] void throw_check(std::string_view expression, std::string values, std::string detail,
                              std::source_location where) {
  // A user is told what is wrong; how it was noticed is the engine's own concern.
  if (std::is_same_v<E, UserError> && !detail.empty()) throw E(detail + values, {}, where);
  const std::string colon = detail.empty() ? "" : ": ";
  throw E(fmt::format("check failed: {}{}{}{} ({}:{})", expression, values, colon, detail,
                      where.file_name(), where.line()),
          {}, where);
}

template <class E, class A, class B>
[[noreturn, gnu::noinline, gnu::cold]] void throw_compare(std::string_view expression, const A& a,
                                                          const B& b, std::string detail,
                                                          std::source_location where) {
  throw_check<E>(expression, fmt::format(" ({} vs {})", printable(a), printable(b)),
                 std::move(detail), where);
}

}  // namespace detail
}  // namespace pagoda

// Checks do not depend on NDEBUG. PAGODA_CHECK guards the engine's own invariants and throws
// EngineError; PAGODA_REQUIRE guards what a caller passes in and throws UserError. Both take an
// optional fmt format and its arguments, which a user sees instead of the condition; the comparing
// forms print both values.
#define PAGODA_CHECK_AS(Family, condition, ...)                                          \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      ::pagoda::detail::throw_check<Family>(#condition, {},                              \
                                            ::pagoda::detail::check_detail(__VA_ARGS__), \
                                            std::source_location::current());            \
    }                                                                                    \
  } while (false)

#define PAGODA_COMPARE_AS(Family, a, op, b, ...)                                           \
  do {                                                                                     \
    const auto& pagoda_a = (a);                                                            \
    const auto& pagoda_b = (b);                                                            \
    if (!(pagoda_a op pagoda_b)) [[unlikely]] {                                            \
      ::pagoda::detail::throw_compare<Family>(#a " " #op " " #b, pagoda_a, pagoda_b,       \
                                              ::pagoda::detail::check_detail(__VA_ARGS__), \
                                              std::source_location::current());            \
    }                                                                                      \
  } while (false)

#define PAGODA_CHECK(condition, ...) \
  PAGODA_CHECK_AS(::pagoda::EngineError, condition __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_CHECK_EQ(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::EngineError, a, ==, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_CHECK_NE(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::EngineError, a, !=, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_CHECK_LT(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::EngineError, a, <, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_CHECK_LE(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::EngineError, a, <=, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_CHECK_GT(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::EngineError, a, >, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_CHECK_GE(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::EngineError, a, >=, b __VA_OPT__(, ) __VA_ARGS__)

#define PAGODA_REQUIRE(condition, ...) \
  PAGODA_CHECK_AS(::pagoda::UserError, condition __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_REQUIRE_EQ(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::UserError, a, ==, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_REQUIRE_NE(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::UserError, a, !=, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_REQUIRE_LT(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::UserError, a, <, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_REQUIRE_LE(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::UserError, a, <=, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_REQUIRE_GT(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::UserError, a, >, b __VA_OPT__(, ) __VA_ARGS__)
#define PAGODA_REQUIRE_GE(a, b, ...) \
  PAGODA_COMPARE_AS(::pagoda::UserError, a, >=, b __VA_OPT__(, ) __VA_ARGS__)

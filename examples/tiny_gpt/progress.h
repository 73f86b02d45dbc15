// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "pagoda/base/bytes.h"
#include "pagoda/base/clock.h"

namespace tiny_gpt {

/// Where a training run stands.
struct Status {
  std::int64_t step = 0;
  std::int64_t steps = 0;  ///< of the whole run; 0 where only time limits it
  double loss = 0;
  double tokens_per_second = 0;
  std::optional<double> stall = {};  ///< share of the time that operators waited for pages
  std::optional<pagoda::Bytes> device = {}, host = {}, nvme = {};  ///< that each tier holds
  double seconds_left = 0;
};

/// One line for people: "step 12/200  loss 2.3456  1234 tok/s  stall 1.2 %  …  1:05 left".
std::string status_line(const Status& status);
/// The same in fewer letters, for narrow terminals.
std::string short_status_line(const Status& status);

/// The line cut to so many columns, with an ellipsis where something is missing. A character of
/// UTF-8 is one column and is never cut in two.
std::string fit(std::string_view line, std::size_t columns);

/// Shows a Status: on a terminal one living line, as wide as the terminal is now, with the cursor
/// hidden while it lives; elsewhere a plain line every few seconds. One thread.
class Progress {
 public:
  struct Options {
    double terminal_interval = 0.1;  ///< seconds between two drawings
    double plain_interval = 5;       ///< and between two lines
  };

  explicit Progress(std::FILE* out);
  Progress(std::FILE* out, Options options);
  /// finish(), whatever happened.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Cheap: draws only when the interval is over, and the first time.
  void show(const Status& status);
  /// Draws the last status that show() was given, ends the line and brings the cursor back.
  void finish();

  /// Brings the cursor back where standard output is a terminal. May be called by the handler of a
  /// signal that ends the program.
  static void restore_cursor() noexcept;

 private:
  void draw(const Status& status);

  std::FILE* out_;
  Options options_;
  bool terminal_;
  bool finished_ = false;
  pagoda::Stopwatch since_drawn_;
  bool drawn_ = false;
  std::optional<Status> last_;  // not drawn yet
};

}  // namespace tiny_gpt

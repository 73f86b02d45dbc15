// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace tiny_gpt {
namespace {

constexpr const char* kHideCursor = "\x1b[?25l";
constexpr const char* kShowCursor = "\x1b[?25h";
constexpr const char* kClearToEnd = "\x1b[K";

std::size_t columns_of(std::FILE* terminal) {
  winsize size{};
  if (ioctl(fileno(terminal), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::ceil(std::max(seconds, 0.0)));
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

std::string status_line(const Status& status) {
  std::string line = fmt::format("step {}", status.step);
  if (status.steps > 0) line += fmt::format("/{}", status.steps);
  line += fmt::format("  loss {:.4f}  {:.0f} tok/s", status.loss, status.tokens_per_second);
  if (status.stall) line += fmt::format("  stall {:.1f} %", 100 * *status.stall);
  const auto tier = [&](const char* name, const std::optional<pagoda::Bytes>& bytes) {
    if (bytes) line += fmt::format("  {} {}", name, pagoda::format_bytes(*bytes));
  };
  tier("device", status.device);
  tier("host", status.host);
  tier("nvme", status.nvme);
  return line + "  " + duration(status.seconds_left) + " left";
}

std::string short_status_line(const Status& status) {
  std::string line = fmt::format("step {}", status.step);
  if (status.steps > 0) line += fmt::format("/{}", status.steps);
  line += fmt::format("  loss {:.3f}  {:.0f} tok/s", status.loss, status.tokens_per_second);
  if (status.stall) line += fmt::format("  stall {:.0f} %", 100 * *status.stall);
  std::string tiers;
  const auto tier = [&](const char* name, const std::optional<pagoda::Bytes>& bytes) {
    if (bytes) tiers += fmt::format(" {} {}M", name, (*bytes + (1U << 19)) >> 20);
  };
  tier("dev", status.device);
  tier("host", status.host);
  tier("nvme", status.nvme);
  return line + (tiers.empty() ? "" : " ") + tiers + "  " + duration(status.seconds_left);
}

std::string fit(std::string_view line, std::size_t columns) {
  const auto starts = [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; };
  std::size_t seen = 0, cut = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (!starts(line[i])) continue;
    ++seen;
    if (seen == columns) cut = i;  // where the ellipsis would go
  }
  if (seen <= columns) return std::string(line);
  return columns == 0 ? std::string() : std::string(line.substr(0, cut)) + "…";
}

Progress::Progress(std::FILE* out) : Progress(out, Options{}) {}

Progress::Progress(std::FILE* out, Options options)
    : out_(out), options_(options), terminal_(isatty(fileno(out)) != 0) {
  if (terminal_) {
    std::fputs(kHideCursor, out_);
    std::fflush(out_);
  }
}

Progress::~Progress() {
  finish();
}

void Progress::show(const Status& status) {
  const double interval = terminal_ ? options_.terminal_interval : options_.plain_interval;
  if (drawn_ && since_drawn_.seconds() < interval) {
    last_ = status;
    return;
  }
  draw(status);
}

void Progress::draw(const Status& status) {
  if (terminal_) {
    // One column less: a line that fills the last one wraps on some terminals.
    const std::size_t columns = columns_of(out_) - 1;
    std::string line = status_line(status);
    if (line.size() > columns) line = short_status_line(status);
    fmt::print(out_, "\r{}{}", fit(line, columns), kClearToEnd);
  } else {
    fmt::print(out_, "{}\n", status_line(status));
  }
  std::fflush(out_);
  since_drawn_.restart();
  drawn_ = true;
  last_.reset();
}

void Progress::finish() {
  if (finished_) return;
  finished_ = true;
  if (last_) draw(Status(*last_));
  if (terminal_) {
    fmt::print(out_, "{}{}", drawn_ ? "\n" : "", kShowCursor);
    std::fflush(out_);
  }
}

void Progress::restore_cursor() noexcept {
  if (isatty(STDOUT_FILENO) == 0) return;
  [[maybe_unused]] const ssize_t written =
      write(STDOUT_FILENO, kShowCursor, std::char_traits<char>::length(kShowCursor));
}

}  // namespace tiny_gpt

// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/step_trace.h"

#include <charconv>
#include <exception>
#include <string>
#include <system_error>
#include <tuple>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/trace.h"

namespace pagoda::engine {
namespace {

std::uint64_t parse_step(std::string_view text) {
  std::uint64_t step = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  if (error != std::errc() || end != text.data() + text.size() || step == 0) {
    throw UserError("it names no steps, such as '7' or '3-5'");
  }
  return step;
}

}  // namespace

std::pair<std::uint64_t, std::uint64_t> parse_step_range(std::string_view text) {
  const std::size_t dash = text.find('-');
  const std::uint64_t first = parse_step(text.substr(0, dash));
  const std::uint64_t last =
      dash == std::string_view::npos ? first : parse_step(text.substr(dash + 1));
  if (last < first) throw UserError("its last step comes before its first");
  return {first, last};
}

StepTrace::StepTrace(std::filesystem::path path, std::string_view steps, int rank, int ranks)
    : path_(std::move(path)) {
  if (path_.empty()) return;
  std::tie(first_, last_) = parse_step_range(steps);
  if (ranks > 1) {
    const std::string extension = path_.extension().string();
    path_.replace_extension(fmt::format("rank{}{}", rank, extension));
  }
  try {
    trace::require_writable(path_);
  } catch (const std::system_error& error) {
    throw UserError(
        fmt::format("trace = '{}' cannot be written: {}", path_.string(), error.code().message()));
  }
}

StepTrace::~StepTrace() {
  finish();
}

void StepTrace::stepped(std::uint64_t steps) noexcept {
  if (path_.empty()) return;
  if (recording_ && steps >= last_) finish();
  if (recording_ || steps + 1 != first_) return;
  if (trace::on()) {
    log::warn("engine", "no trace: another recording is under way", {{"file", path_.string()}});
    return;
  }
  trace::start();
  recording_ = true;
}

void StepTrace::finish() noexcept {
  if (!recording_) return;
  recording_ = false;
  trace::stop();
  try {
    trace::write(path_);
    log::info("engine", "trace written: open it at ui.perfetto.dev", {{"file", path_.string()}});
  } catch (const std::exception& error) {  // a trace never ends a training
    log::warn("engine", "the trace could not be written",
              {{"file", path_.string()}, {"cause", error.what()}});
  }
}

}  // namespace pagoda::engine

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>

namespace pagoda::engine {

/// The steps that `trace_steps` names: "7", or "3-5". UserError for anything else.
std::pair<std::uint64_t, std::uint64_t> parse_step_range(std::string_view text);

/// Records chosen steps and writes them to a file that ui.perfetto.dev opens. With several ranks
/// each writes its own, "trace.rank1.json" for "trace.json". One thread.
class StepTrace {
 public:
  /// `path` empty: records nothing.
  StepTrace(std::filesystem::path path, std::string_view steps, int rank, int ranks);
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;
  /// Writes what there is of steps that were not all taken.
  ~StepTrace();

  /// `steps` have been taken: the forward of the next begins.
  void stepped(std::uint64_t steps) noexcept;

 private:
  void finish() noexcept;

  std::filesystem::path path_;
  std::uint64_t first_ = 0;
  std::uint64_t last_ = 0;
  bool recording_ = false;
};

}  // namespace pagoda::engine

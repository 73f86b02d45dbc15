// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "pagoda/base/bytes.h"

namespace tiny_gpt {

/// What the command line says.
struct Flags {
  std::int64_t steps = 0;  ///< 0: until the time is over
  double seconds = 120;
  std::int64_t batch = 4;
  std::int64_t sequence = 128;
  double lr = 3e-4;
  std::uint64_t seed = 1;
  std::filesystem::path directory = ".";  ///< of the swap files
  int threads = 0;                        ///< of torch; 0: half of the machine's cores
  std::string device = "cpu";             ///< where operators run
  pagoda::Bytes device_budget = pagoda::Bytes{10} << 20;  ///< for pages and gradients on their way
  pagoda::Bytes host_budget = pagoda::Bytes{32} << 20;    ///< for buffers between device and disk
  pagoda::Bytes disk_budget = pagoda::Bytes{192} << 20;
  std::filesystem::path text = {};  ///< empty: the usual places
  std::int64_t sample = 300;        ///< bytes to write at the end
  std::int64_t repeat = 5;          ///< first steps to repeat with everything on the device
};

/// Reads the command line. Throws UserError, whose message is one line, for flags or values that
/// make no sense; returns nothing after it has printed the help that was asked for.
std::optional<Flags> parse_flags(int argc, const char* const* argv);

}  // namespace tiny_gpt

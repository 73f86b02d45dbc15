// SPDX-License-Identifier: Apache-2.0
#include "flags.h"

#include <cstdio>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <unistd.h>

#include "pagoda/base/error.h"

namespace tiny_gpt {
namespace {

void add_bytes(CLI::App& app, const char* flag, pagoda::Bytes& to, const char* what) {
  app.add_option_function<std::string>(
         flag,
         [&to, flag](const std::string& text) {
           to = pagoda::parse_bytes(text);
           if (to == 0) throw pagoda::UserError(fmt::format("{}: must be above 0", flag));
         },
         what)
      ->type_name("BYTES")
      ->default_str(pagoda::format_bytes(to));
}

void check_directory(const std::filesystem::path& directory) {
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    throw pagoda::UserError(fmt::format("--dir: there is no directory '{}'", directory.string()));
  }
  if (access(directory.c_str(), W_OK | X_OK) != 0) {
    throw pagoda::UserError(
        fmt::format("--dir: the directory '{}' cannot be written", directory.string()));
  }
}

}  // namespace

std::optional<Flags> parse_flags(int argc, const char* const* argv) {
  Flags flags;
  CLI::App app{
      "Trains a small GPT on text that this machine has, with all of it on disk and little of it "
      "in\n"
      "memory at a time, shows that the numbers are those of training in memory, and lets it "
      "write."};
  app.name("tiny_gpt");
  // Without their descriptions: the help names the types alone.
  const auto range = [](auto low, auto high) { return CLI::Range(low, high).description(""); };
  const auto positive = range(std::int64_t{1}, std::int64_t{1} << 20);
  auto* steps = app.add_option("--steps", flags.steps, "Steps to train; default: by time");
  steps->check(positive);
  app.add_option("--seconds", flags.seconds, "Time to train")
      ->check(range(0.1, 1e7))
      ->capture_default_str()
      ->excludes(steps);
  app.add_option("--batch", flags.batch, "Sequences in a batch")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--sequence", flags.sequence, "Bytes in a sequence")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--lr", flags.lr, "Learning rate")->check(range(0.0, 1.0))->capture_default_str();
  app.add_option("--seed", flags.seed, "Of the model, the batches and the sample")
      ->capture_default_str();
  app.add_option("--dir", flags.directory, "Directory of the swap files")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--threads", flags.threads,
                 "Threads that compute; default: half of the cores, the engine has the others")
      ->check(range(1, 1024));
  app.add_option("--device", flags.device, "Where operators run: cpu, cuda or emulated")
      ->capture_default_str();
  add_bytes(app, "--device-budget", flags.device_budget,
            "Device memory for parameters and gradients");
  add_bytes(app, "--host-budget", flags.host_budget, "Host memory for buffers on the way to disk");
  add_bytes(app, "--disk-budget", flags.disk_budget, "Disk for all that the model is made of");
  app.add_option("--text", flags.text, "File or folder to learn; default: what the system has")
      ->type_name("PATH");
  app.add_option("--sample", flags.sample, "Bytes to write after training; 0 for none")
      ->check(range(std::int64_t{0}, std::int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--repeat", flags.repeat,
                 "First steps to repeat with everything on the device; 0 for none")
      ->check(range(std::int64_t{0}, std::int64_t{1} << 20))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw pagoda::UserError(fmt::format("{}; see 'tiny_gpt --help'", error.what()));
  }
  check_directory(flags.directory);
  return flags;
}

}  // namespace tiny_gpt

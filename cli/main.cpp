// SPDX-License-Identifier: Apache-2.0
// The `pagoda` program: parses the command line, runs one command, turns errors into one line.
#include <iostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "commands.h"
#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/version.h"
#include "pagoda/engine/nearest_word.h"
#include "pagoda/torch/torch_version.h"

namespace {

constexpr int kUsageError = 2;   // the caller's fault: flags, paths, budgets
constexpr int kEngineError = 1;  // the engine's or the machine's

/// A command with those around it: "bench io".
std::string path_of(const CLI::App& command) {
  const CLI::App* around = command.get_parent();
  const bool outermost = around == nullptr || around->get_parent() == nullptr;
  return outermost ? command.get_name() : path_of(*around) + " " + command.get_name();
}

std::string version_text() {
  return fmt::format("pagoda {} (torch {}, built against {})", pagoda::kVersion,
                     pagoda::torch::loaded_version(), pagoda::torch::built_version());
}

/// One line: what is wrong, and where help is. CLI11 calls a mistyped command a missing one, and an
/// option that it does not know an unexpected argument.
std::string usage_message(const CLI::App* app, const CLI::Error& error) {
  const std::vector<std::string> unknown = app->remaining(true);
  while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
  std::string what = error.what();
  const bool is_option = !unknown.empty() && unknown.front().starts_with("-");
  if (!unknown.empty()) {
    what = fmt::format("unknown {} '{}'", is_option ? "option" : "command", unknown.front());
    std::vector<std::string> known;
    for (const CLI::App* command : app->get_subcommands({})) known.push_back(command->get_name());
    for (const CLI::Option* option : app->get_options()) {
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    }
    if (const auto near = pagoda::nearest_word(unknown.front(), known)) {
      what += fmt::format("; did you mean '{}'?", *near);
    }
  } else if (error.get_name() == "RequiredError") {
    what = "a command is required";
  }
  return fmt::format("pagoda: {}{}see '{} --help'\n", what, what.ends_with('?') ? " " : "; ",
                     app->get_parent() == nullptr ? "pagoda" : "pagoda " + path_of(*app));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Pagoda: virtual memory for model training. It trains models that are far larger than the\n"
      "accelerator's memory, unmodified, at close to the speed of having everything there."};
  app.name("pagoda");
  app.set_version_flag("--version", version_text, "Print the versions of pagoda and torch");
  app.require_subcommand(1);
  app.failure_message(usage_message);
  app.footer(
      "Run 'pagoda COMMAND --help' for the flags of a command.\n"
      "PAGODA_LOG=debug|info|warn|error sets what is logged, PAGODA_LOG_FORMAT=json its form.");
  app.add_option_function<std::string>(
         "--log",
         [](const std::string& name) { pagoda::log::set_level(pagoda::log::parse_level(name)); },
         "Lowest level to log: trace, debug, info, warn, error or off")
      ->type_name("LEVEL");

  CLI::App* bench = app.add_subcommand(
      "bench", "Measure a part of the machine and of Pagoda, each figure beside its limit");
  bench->require_subcommand(1);
  pagoda::cli::add_bench_base(*bench);
  pagoda::cli::add_bench_device(*bench);
  pagoda::cli::add_bench_io(*bench);
  pagoda::cli::add_bench_adam(*bench);
  pagoda::cli::add_bench_pager(*bench);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? 0 : kUsageError;
  } catch (const pagoda::UserError& e) {
    fmt::print(stderr, "pagoda: {}\n", e.message());
    return kUsageError;
  } catch (const std::exception& e) {
    fmt::print(stderr, "pagoda: {}\n", e.what());
    return kEngineError;
  }
  return 0;
}

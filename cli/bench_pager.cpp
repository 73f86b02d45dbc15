// SPDX-License-Identifier: Apache-2.0
// `pagoda bench pager`: what paging costs, beside what it could cost at best.
#include "bench_pager.h"

#include <cstdio>
#include <filesystem>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "commands.h"
#include "pagoda/base/error.h"
#include "pagoda/torch/bench/paged_programs.h"

namespace pagoda::cli {
namespace {

struct PagerFlags {
  std::size_t pages = 5000;
  std::size_t steps = 8;
  std::string dir;
  std::string states = "768MiB";
  std::string only;
  bool json = false;
};

void bench_observer(BenchReport& report, const PagerFlags& flags) {
  constexpr std::size_t kRounds = 21;  // at least: they are short
  const torch::bench::ObserverCost cost =
      torch::bench::observer_cost(flags.pages, std::max(kRounds, flags.steps));
  report.add({"observer cost", cost.untouched, "ns", 1000, "1 µs an operator (at most 100 %)"});
  report.add(
      {"observer cost, touching", cost.touching, "ns", 1000, "1 µs an operator (at most 100 %)"});
  report.note(fmt::format("Observer: {} pages in the table; a tiny operator takes {:.0f} ns.",
                          flags.pages, cost.operator_alone));
}

void bench_hit_rate(BenchReport& report, const PagerFlags& flags) {
  constexpr std::size_t kLayers = 8;
  constexpr std::size_t kWidth = 256;
  constexpr std::size_t kWarm = 3;  // passes in which the order is learnt
  Config config;
  config.device = "cpu";
  config.device_budget = 6_MiB;  // of 25 MiB
  config.gradient_staging = 2_MiB;
  config.staging = 1_MiB;
  config.update_chunk = 1_MiB;
  config.parameters = config.gradients = config.optimizer_state = Placement::Host;
  if (!flags.dir.empty()) {
    config.nvme = {flags.dir};
    config.nvme_budget = 256_MiB;
    config.parameters = config.gradients = config.optimizer_state = Placement::Nvme;
  }
  const auto stats = torch::bench::train_gpt_like(config, kLayers, kWidth,
                                                  kWarm + std::max<std::size_t>(1, flags.steps));
  pager::PagerStats steady = stats.back().pager;
  const pager::PagerStats& before = stats[kWarm - 1].pager;
  steady.faults -= before.faults;
  steady.late_prefetches -= before.late_prefetches;
  steady.prefetch_hits -= before.prefetch_hits;
  report.add({"prefetch hit rate", steady.hit_rate(), "", 1, "every page foreseen"});
  report.note(
      fmt::format("Hit rate: a GPT-like program of {} layers whose parameters are four times the "
                  "budget, on {}; "
                  "steps {} to {}: {} prefetch hits, {} late, {} faults.",
                  kLayers, flags.dir.empty() ? "the host" : "disk", kWarm + 1, stats.size(),
                  steady.prefetch_hits, steady.late_prefetches, steady.faults));
}

void run_pager(const PagerFlags& flags) {
  PAGODA_REQUIRE(flags.pages > 0 && flags.steps > 0, "--pages and --steps must be at least 1");
  PAGODA_REQUIRE(flags.dir.empty() || std::filesystem::is_directory(flags.dir),
                 "--dir: there is no directory '{}'", flags.dir);
  PAGODA_REQUIRE(flags.only != "disk" || !flags.dir.empty(), "--only disk needs --dir");
  BenchReport report("Paging beside what it could cost at best (lower is better, but for rates)");
  const auto wanted = [&](std::string_view part) {
    return flags.only.empty() || part.find(flags.only) != std::string_view::npos;
  };
  if (wanted("observer")) bench_observer(report, flags);
  if (wanted("prefetch")) bench_hit_rate(report, flags);
  if (wanted("step")) bench_paged_step(report, flags.steps);
  if (wanted("disk")) {
    if (flags.dir.empty()) {
      report.note("States on disk: not measured, --dir names no directory for them.");
    } else {
      bench_disk_step(report, flags.dir, parse_bytes(flags.states), flags.steps);
    }
  }
  if (wanted("bookkeeping")) bench_bookkeeping(report, flags.pages);
  if (wanted("gather")) bench_gather(report, flags.steps);
  PAGODA_REQUIRE(!report.rows().empty(),
                 "--only: there is no part '{}'; there are observer, prefetch, step, disk, "
                 "bookkeeping and gather",
                 flags.only);
  std::fputs((flags.json ? report.json() + "\n" : report.table()).c_str(), stdout);
}

}  // namespace

void add_bench_pager(CLI::App& bench) {
  CLI::App* command =
      bench.add_subcommand("pager", "What paging costs: observer, prefetch, step, pages, ranks");
  auto flags = std::make_shared<PagerFlags>();
  command->add_option("--pages", flags->pages, "Pages in the table")->capture_default_str();
  command->add_option("--steps", flags->steps, "Steps, or rounds, that are measured")
      ->capture_default_str();
  command->add_option("--dir", flags->dir,
                      "Directory for states on disk (default: the hit rate's are on the host)");
  command
      ->add_option("--states", flags->states,
                   "Bytes of the disk part's states (twice that is needed on the disk)")
      ->capture_default_str();
  command->add_option("--only", flags->only,
                      "One part: observer, prefetch, step, disk, bookkeeping or gather");
  command->add_flag("--json", flags->json, "One JSON object instead of a table");
  command->callback([flags] { run_pager(*flags); });
}

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iostream>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>

#include "bench_report.h"
#include "commands.h"
#include "pagoda/base/budget.h"
#include "pagoda/base/clock.h"
#include "pagoda/base/thread_pool.h"
#include "pagoda/base/trace.h"

namespace pagoda::cli {
namespace {

/// Keeps the compiler from removing a loop that computes nothing.
inline void touch_memory() {
  asm volatile("" ::: "memory");
}

/// Nanoseconds a call of `fn`, the median of several rounds of `calls` calls.
template <class Fn>
double nanoseconds_per_call(int calls, const Fn& fn) {
  std::vector<double> rounds;
  for (int round = 0; round < 9; ++round) {
    const Stopwatch watch;
    for (int i = 0; i < calls; ++i) {
      fn();
      touch_memory();
    }
    rounds.push_back(static_cast<double>(watch.elapsed_ns()) / calls);
  }
  return median(std::move(rounds));
}

BenchReport run() {
  BenchReport report("What the foundations cost, per call (lower is better; the limit is a bound)");
  const auto scope = [] { PAGODA_TRACE("bench", "scope"); };
  const double clock = nanoseconds_per_call(1'000'000, [] { (void)now_ns(); });

  report.add({"trace scope, off", nanoseconds_per_call(10'000'000, scope), "ns", 5, "goal"});
  trace::start();
  report.add({"trace scope, recording", nanoseconds_per_call(100'000, scope), "ns", 2 * clock,
              "reading the clock twice"});
  trace::stop();

  Budget budget("bench", 1_GiB);
  const double lock = [] {
    std::mutex mutex;
    return nanoseconds_per_call(1'000'000, [&] { const std::lock_guard guard(mutex); });
  }();
  report.add({"reserve and release",
              nanoseconds_per_call(100'000, [&] { (void)budget.reserve(4096, "pages"); }), "ns",
              2 * lock, "a mutex taken twice"});

  ThreadPool pool(std::max(1U, std::thread::hardware_concurrency()), "bench");
  const double thread = nanoseconds_per_call(200, [] { std::thread([] {}).join(); });
  report.add({"submit and wait", nanoseconds_per_call(2000, [&] { pool.submit([] {}).get(); }),
              "ns", thread, "making and joining a thread"});
  report.add({"parallel_for over 64 pieces",
              nanoseconds_per_call(
                  1000, [&] { pool.parallel_for(0, 64, 1, [](auto, auto) { touch_memory(); }); }),
              "ns", thread, "making and joining a thread"});
  return report;
}

}  // namespace

void add_bench_base(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "base", "Tracing, budgets and threads: what a call costs (a second or two)");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print one JSON object instead of a table");
  command->callback([json] {
    const BenchReport report = run();
    std::cout << (*json ? report.json() + "\n" : report.table());
  });
}

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace CLI {
class App;
}

/// The sub-commands of the `pagoda` program, one file each. A command prints its result to standard
/// output and throws UserError or EngineError; main() turns those into one line and an exit code.
namespace pagoda::cli {

/// `pagoda bench base`: what tracing, budgets and threads cost.
void add_bench_base(CLI::App& bench);
/// `pagoda bench device`: arenas, streams and copies beside what they stand on.
void add_bench_device(CLI::App& bench);
/// `pagoda bench io`: the swap path beside fio.
void add_bench_io(CLI::App& bench);
/// `pagoda bench adam`: the optimizer kernels beside the machine's memory bandwidth.
void add_bench_adam(CLI::App& bench);
/// `pagoda bench pager`: the engine beside what paging could cost at best.
void add_bench_pager(CLI::App& bench);

}  // namespace pagoda::cli

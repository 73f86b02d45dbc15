// SPDX-License-Identifier: Apache-2.0
// The parts of `pagoda bench pager`.
#pragma once

#include <cstddef>
#include <filesystem>

#include "bench_report.h"
#include "pagoda/base/bytes.h"

namespace pagoda::cli {

/// Steps of a made-up model through the engine, on a device whose links have a set speed, with
/// operators that take a set time.
void bench_paged_step(BenchReport& report, std::size_t steps);
/// Steps of the same model with its optimizer state on disk, as fast as the disk lets them be.
void bench_disk_step(BenchReport& report, const std::filesystem::path& directory, Bytes states,
                     std::size_t steps);
/// What the engine needs for a page besides its contents.
void bench_bookkeeping(BenchReport& report, std::size_t pages);
/// One page to every rank: from a shard on each, and from one owner.
void bench_gather(BenchReport& report, std::size_t rounds);

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <sys/statvfs.h>

#include "bench_report.h"
#include "commands.h"
#include "disk_load.h"
#include "fio.h"
#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/error.h"
#include "pagoda/io/checksum.h"
#include "raw_disk.h"
#include "swap_load.h"

namespace pagoda::cli {
namespace {

struct Flags {
  std::vector<std::string> directories = {"."};
  std::string size = "2GiB";
  std::string block = "1MiB";
  unsigned depth = 16;
  double seconds = 1;
  unsigned rounds = 5;
  std::string engine = "auto";
  std::string only;
  bool small_pages = false;
  bool alone = false;
  bool json = false;
};

void require_room(const std::vector<std::filesystem::path>& directories, Bytes size) {
  for (const auto& directory : directories) {
    struct statvfs disk {};
    if (::statvfs(directory.c_str(), &disk) != 0) {
      throw UserError(fmt::format("--dir '{}' does not exist", directory.string()));
    }
    const Bytes available = static_cast<Bytes>(disk.f_bavail) * disk.f_frsize;
    if (available < size / directories.size()) {
      throw UserError(fmt::format(
          "the bench needs {} in '{}', where {} are free: choose a smaller "
          "--size or another --dir",
          format_bytes(size / directories.size()), directory.string(), format_bytes(available)));
    }
  }
}

/// fio, or our own loop where it is not to be had: then `no_fio` says why.
std::unique_ptr<DiskLimit> make_limit(const std::vector<std::filesystem::path>& directories,
                                      Bytes size, std::string& no_fio) {
  if (!Fio::present()) {
    no_fio = "fio is not installed";
  } else {
    try {
      return std::make_unique<Fio>(directories, size);
    } catch (const EngineError& error) {
      no_fio = error.message();
    }
  }
  return std::make_unique<RawDisk>(directories, size);
}

/// One way through the swap path that is measured beside the limit.
struct Contestant {
  std::string name;
  std::unique_ptr<SwapLoad> load;
};

void run_bench(const Flags& flags) {
  const std::vector<std::filesystem::path> directories(flags.directories.begin(),
                                                       flags.directories.end());
  DiskLoad load{.block = parse_bytes(flags.block), .depth = flags.depth, .seconds = flags.seconds};
  PAGODA_REQUIRE(is_power_of_two(load.block) && load.block >= 4_KiB && load.block <= 64_MiB,
                 "--block must be a power of two from 4KiB to 64MiB");
  PAGODA_REQUIRE(flags.depth > 0 && flags.rounds > 0, "--depth and --rounds must be at least 1");
  const Bytes unit = std::max(load.block, 1_MiB) * directories.size();
  const Bytes size = parse_bytes(flags.size) / unit * unit;
  PAGODA_REQUIRE_GE(size, 2 * unit, "--size is too small for this --block");
  const io::EngineChoice engine = io::parse_engine(flags.engine);
  require_room(directories, (flags.alone ? 1 : 4) * size);

  std::string no_fio;
  const std::unique_ptr<DiskLimit> limit =
      flags.alone ? nullptr : make_limit(directories, size, no_fio);
  const auto pages = flags.small_pages ? AlignedBuffer::Pages::Default : AlignedBuffer::Pages::Huge;
  std::vector<Contestant> contestants;
  const auto enter = [&](std::string name, io::EngineChoice with, bool checksums) {
    const SwapLoad::Options options{size, load.block, load.depth, with, checksums, pages};
    contestants.push_back({std::move(name), std::make_unique<SwapLoad>(directories, options)});
  };
  if (!flags.alone) enter("checksums off", engine, false);
  enter("checksums on", engine, true);
  const SwapLoad& first = *contestants.front().load;
  if (!flags.alone && first.engine_name() != "posix") {
    enter("posix engine, checksums off", io::EngineChoice::Posix, false);
  }

  const std::string limit_name = limit != nullptr ? limit->name() : "";
  BenchReport report("pagoda bench io: the swap path " +
                     (limit != nullptr ? "beside " + limit_name : "alone"));
  for (const auto& [kind, name] : {std::pair(DiskLoad::Kind::Read, "read"),
                                   {DiskLoad::Kind::Write, "write"},
                                   {DiskLoad::Kind::Mixed, "mixed"}}) {
    if (!flags.only.empty() && flags.only != name) continue;
    load.kind = kind;
    std::vector<double> limits;
    std::vector<std::vector<double>> values(contestants.size());
    // In turns, the order reversed each round: a disk that drifts drifts for all.
    for (unsigned round = 0; round < flags.rounds; ++round) {
      for (std::size_t step = 0; step <= contestants.size(); ++step) {
        const std::size_t who = round % 2 == 0 ? step : contestants.size() - step;
        if (who == 0) {
          limits.push_back(limit != nullptr ? limit->run(load) : 0);
        } else {
          values[who - 1].push_back(contestants[who - 1].load->run(kind, load.seconds));
        }
      }
    }
    for (std::size_t i = 0; i < contestants.size(); ++i) {
      report.add({fmt::format("{}, {}", name, contestants[i].name), median(values[i]) * 1e-9,
                  "GB/s", median(limits) * 1e-9, limit_name});
    }
  }
  report.note(fmt::format(
      "{} in {} director{}, blocks of {}, depth {}, {} round{} of {} s in turns, "
      "medians; engine {}, "
      "{}, {} buffers on {}, checksums {}.",
      format_bytes(size), directories.size(), directories.size() == 1 ? "y" : "ies",
      format_bytes(load.block), flags.depth, flags.rounds, flags.rounds == 1 ? "" : "s",
      flags.seconds, first.engine_name(), first.direct() ? "O_DIRECT" : "through the page cache",
      first.registered() ? "registered" : "unregistered",
      flags.small_pages ? "small pages, as fio's" : "huge pages, as the engine's (fio: small)",
      io::checksum_target()));
  if (!no_fio.empty()) {
    report.note(fmt::format("The limit is a plain loop of our own: {}.", no_fio));
  }
  std::puts(flags.json ? report.json().c_str() : report.table().c_str());
}

}  // namespace

void add_bench_io(CLI::App& bench) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = bench.add_subcommand(
      "io", "Read, write and mixed throughput of the swap path, beside fio in the same run");
  command->add_option(
      "--dir", flags->directories,
      "Where to put the files; several are striped (default: the current directory)");
  command
      ->add_option("--size", flags->size,
                   "Size of the files (four times that is needed, with --alone once)")
      ->capture_default_str();
  command->add_option("--block", flags->block, "Bytes per request")->capture_default_str();
  command->add_option("--depth", flags->depth, "Requests in flight per directory")
      ->capture_default_str();
  command->add_option("--seconds", flags->seconds, "Length of each measurement")
      ->capture_default_str();
  command->add_option("--rounds", flags->rounds, "Measurements of each kind; the median counts")
      ->capture_default_str();
  command->add_option("--engine", flags->engine, "auto, uring or posix")->capture_default_str();
  command->add_option("--only", flags->only, "One kind: read, write or mixed")
      ->check(CLI::IsMember({"read", "write", "mixed"}));
  command->add_flag("--small-pages", flags->small_pages,
                    "Our buffers on 4 KiB pages, as fio's are, instead of huge ones");
  command->add_flag("--alone", flags->alone,
                    "Only our path with checksums, and no limit beside it");
  command->add_flag("--json", flags->json, "One JSON object instead of a table");
  command->callback([flags] { run_bench(*flags); });
}

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <sys/statvfs.h>

#include "bench_report.h"
#include "commands.h"
#include "disk_load.h"
#include "fio.h"
#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/clock.h"
#include "pagoda/base/error.h"
#include "pagoda/io/checksum.h"
#include "pagoda/io/swap_space.h"
#include "raw_disk.h"

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
  bool json = false;
};

/// A swap space under load: one thread, registered buffers, the next block from each completion.
class SwapLoad {
 public:
  SwapLoad(const std::vector<std::filesystem::path>& directories, Bytes size, const DiskLoad& load,
           io::EngineChoice engine, bool checksums, AlignedBuffer::Pages pages)
      : budget_("nvme", size),
        space_(options(directories, size, load, engine, checksums), budget_),
        extent_(space_.allocate(size)),
        block_(load.block),
        blocks_(size / load.block),
        // A few more than the disk's queue holds, so that it is never short of one.
        slots_(load.depth * directories.size() + 4),
        memory_(slots_ * block_, 4096, pages) {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      memory_.data()[i] = static_cast<std::byte>(i * 2654435761U >> 7);
    }
    registered_ = space_.register_buffer(memory_.span());
    run(DiskLoad::Kind::Write, 0, blocks_);  // reads find data, writes are overwrites
  }

  double run(DiskLoad::Kind kind, double seconds) { return run(kind, seconds, 0); }

  std::string_view engine_name() const { return space_.engine_name(); }
  bool direct() const { return space_.direct(); }
  bool registered() const { return registered_.registered(); }

 private:
  static io::SwapOptions options(const std::vector<std::filesystem::path>& directories, Bytes size,
                                 const DiskLoad& load, io::EngineChoice engine, bool checksums) {
    io::SwapOptions options;
    options.directories = directories;
    options.capacity = size;
    options.io_bytes = load.block;
    options.stripe_bytes = std::max(options.stripe_bytes, load.block);
    options.checksum_block = std::min(options.checksum_block, load.block);
    options.checksums = checksums;
    options.engine = engine;
    options.depth = load.depth;
    return options;
  }

  /// For `seconds`, and at least `least` blocks. Bytes a second.
  double run(DiskLoad::Kind kind, double seconds, std::uint64_t least) {
    std::mutex mutex;
    std::condition_variable ended;
    std::deque<std::size_t> free;  // guarded by mutex; slots whose transfer has ended
    std::exception_ptr failed;     // guarded by mutex
    for (std::size_t i = 0; i < slots_; ++i) free.push_back(i);
    std::vector<io::Transfer> transfers(slots_);
    std::uint64_t started = 0;
    const Stopwatch watch;
    while ((started < least || watch.seconds() < seconds) && failed == nullptr) {
      std::size_t slot = 0;
      {
        std::unique_lock lock(mutex);
        ended.wait(lock, [&] { return !free.empty(); });
        slot = free.front();
        free.pop_front();
      }
      const auto end = [&, slot](std::exception_ptr error) {
        const std::lock_guard lock(mutex);
        if (error != nullptr) failed = error;
        free.push_back(slot);
        ended.notify_one();
      };
      transfers[slot] = start(kind, started++, memory_.span().subspan(slot * block_, block_), end);
    }
    for (io::Transfer& transfer : transfers) transfer.wait();
    return static_cast<double>(started * block_) / watch.seconds();
  }

  /// Sequential, as fio does it; mixed reads and writes each in a half of their own.
  io::Transfer start(DiskLoad::Kind kind, std::uint64_t turn, std::span<std::byte> memory,
                     io::TransferCallback callback) {
    const std::uint64_t half = std::max<std::uint64_t>(1, blocks_ / 2);
    const bool mixed = kind == DiskLoad::Kind::Mixed;
    const bool reads = mixed ? turn % 2 == 0 : kind == DiskLoad::Kind::Read;
    const std::uint64_t block = !mixed ? turn % blocks_ : turn / 2 % half + (reads ? 0 : half);
    const Bytes offset = block % blocks_ * block_;
    return reads ? space_.read(extent_, offset, memory, std::move(callback))
                 : space_.write(extent_, offset, memory, std::move(callback));
  }

  Budget budget_;
  io::SwapSpace space_;
  io::Extent extent_;
  Bytes block_;
  std::uint64_t blocks_;
  std::size_t slots_;
  AlignedBuffer memory_;
  io::RegisteredBuffer registered_;
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
  require_room(directories, 4 * size);

  std::unique_ptr<DiskLimit> limit;
  std::string no_fio = "fio is not installed";
  if (Fio::present()) {
    try {
      limit = std::make_unique<Fio>(directories, size);
    } catch (const EngineError& error) {
      no_fio = error.message();
    }
  }
  if (limit == nullptr) limit = std::make_unique<RawDisk>(directories, size);
  const auto pages = flags.small_pages ? AlignedBuffer::Pages::Default : AlignedBuffer::Pages::Huge;
  std::vector<Contestant> contestants;
  const auto enter = [&](std::string name, io::EngineChoice with, bool checksums) {
    contestants.push_back({std::move(name), std::make_unique<SwapLoad>(directories, size, load,
                                                                       with, checksums, pages)});
  };
  enter("checksums off", engine, false);
  enter("checksums on", engine, true);
  const SwapLoad& first = *contestants.front().load;
  if (first.engine_name() != "posix") {
    enter("posix engine, checksums off", io::EngineChoice::Posix, false);
  }

  BenchReport report("pagoda bench io: the swap path beside " + limit->name());
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
          limits.push_back(limit->run(load));
        } else {
          values[who - 1].push_back(contestants[who - 1].load->run(kind, load.seconds));
        }
      }
    }
    for (std::size_t i = 0; i < contestants.size(); ++i) {
      report.add({fmt::format("{}, {}", name, contestants[i].name), median(values[i]) * 1e-9,
                  "GB/s", median(limits) * 1e-9, limit->name()});
    }
  }
  report.note(fmt::format(
      "{} in {} director{}, blocks of {}, depth {}, {} rounds of {} s in turns, "
      "medians; engine {}, "
      "{}, {} buffers on {}, checksums {}.",
      format_bytes(size), directories.size(), directories.size() == 1 ? "y" : "ies",
      format_bytes(load.block), flags.depth, flags.rounds, flags.seconds, first.engine_name(),
      first.direct() ? "O_DIRECT" : "through the page cache",
      first.registered() ? "registered" : "unregistered",
      flags.small_pages ? "small pages, as fio's" : "huge pages, as the engine's (fio: small)",
      io::checksum_target()));
  if (dynamic_cast<Fio*>(limit.get()) == nullptr) {
    report.note(fmt::format("The limit is a plain loop of our own: {}.", no_fio));
  }
  std::puts(flags.json ? report.json().c_str() : report.table().c_str());
}

}  // namespace

void add_bench_io(CLI::App& bench) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = bench.add_subcommand(
      "io", "Read, write and mixed throughput of the swap path, beside fio in the same run");
  command->add_option("--dir", flags->directories,
                      "Where to put the files; several are striped (default: here)");
  command->add_option("--size", flags->size, "Size of the files (four times that is needed)")
      ->capture_default_str();
  command->add_option("--block", flags->block, "Bytes a request")->capture_default_str();
  command->add_option("--depth", flags->depth, "Requests in flight a directory")
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
  command->add_flag("--json", flags->json, "One JSON object instead of a table");
  command->callback([flags] { run_bench(*flags); });
}

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
#include "raw_disk.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include <unistd.h>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/clock.h"
#include "pagoda/io/io_error.h"

namespace pagoda::cli {

RawDisk::RawDisk(const std::vector<std::filesystem::path>& directories, Bytes size) {
  for (const auto& directory : directories) {
    files_.emplace_back(
        directory, align_up(size / directories.size(), 4096),
        io::SwapFile::Options{.direct = io::Direct::Auto, .preallocate = io::Preallocate::Zero});
  }
}

double RawDisk::run(const DiskLoad& load) {
  std::atomic<Bytes> moved{0};
  std::atomic<int> failed{0};
  std::atomic<std::uint64_t> turn{0};
  const Stopwatch watch;
  const auto work = [&](const io::SwapFile& file) {
    AlignedBuffer memory(load.block);
    std::memset(memory.data(), 1, memory.size());
    const Bytes blocks = file.size() / load.block;
    while (watch.seconds() < load.seconds && failed == 0) {
      const std::uint64_t mine = turn++;
      const auto offset = static_cast<off_t>(mine % blocks * load.block);
      const bool reads = load.kind == DiskLoad::Kind::Read ||
                         (load.kind == DiskLoad::Kind::Mixed && mine % 2 == 0);
      const ssize_t result = reads ? ::pread(file.fd(), memory.data(), load.block, offset)
                                   : ::pwrite(file.fd(), memory.data(), load.block, offset);
      if (result < 0) failed = errno;
      if (result > 0) moved += static_cast<Bytes>(result);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < load.depth; ++i) {
    for (const io::SwapFile& file : files_) threads.emplace_back(work, std::cref(file));
  }
  for (std::thread& thread : threads) thread.join();
  if (failed != 0) {
    throw io::IoError("the raw loop failed", files_.front().path(), 0, load.block, failed);
  }
  return static_cast<double>(moved) / watch.seconds();
}

}  // namespace pagoda::cli

// SPDX-License-Identifier: Apache-2.0
#include "swap_load.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "pagoda/base/clock.h"

namespace pagoda::cli {

SwapLoad::SwapLoad(const std::vector<std::filesystem::path>& directories, const Options& options)
    : budget_("nvme", options.size),
      space_(swap_options(directories, options), budget_),
      extent_(space_.allocate(options.size)),
      block_(options.block),
      blocks_(options.size / options.block),
      // A few more than the disk's queue holds, so that it is never short of one.
      slots_(options.depth * directories.size() + 4),
      memory_(slots_ * block_, 4096, options.pages) {
  for (std::size_t i = 0; i < memory_.size(); ++i) {
    memory_.data()[i] = static_cast<std::byte>(i * 2654435761U >> 7);
  }
  registered_ = space_.register_buffer(memory_.span());
  run(DiskLoad::Kind::Write, 0, blocks_);
}

io::SwapOptions SwapLoad::swap_options(const std::vector<std::filesystem::path>& directories,
                                       const Options& options) {
  io::SwapOptions out;
  out.directories = directories;
  out.capacity = options.size;
  out.io_bytes = options.block;
  out.stripe_bytes = std::max(out.stripe_bytes, options.block);
  out.checksum_block = std::min(out.checksum_block, options.block);
  out.checksums = options.checksums;
  out.engine = options.engine;
  out.depth = options.depth;
  return out;
}

double SwapLoad::run(DiskLoad::Kind kind, double seconds, std::uint64_t least) {
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
io::Transfer SwapLoad::start(DiskLoad::Kind kind, std::uint64_t turn, std::span<std::byte> memory,
                             io::TransferCallback callback) {
  const std::uint64_t half = std::max<std::uint64_t>(1, blocks_ / 2);
  const bool mixed = kind == DiskLoad::Kind::Mixed;
  const bool reads = mixed ? turn % 2 == 0 : kind == DiskLoad::Kind::Read;
  const std::uint64_t block = !mixed ? turn % blocks_ : turn / 2 % half + (reads ? 0 : half);
  const Bytes offset = block % blocks_ * block_;
  return reads ? space_.read(extent_, offset, memory, std::move(callback))
               : space_.write(extent_, offset, memory, std::move(callback));
}

}  // namespace pagoda::cli

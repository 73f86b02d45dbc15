// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/volume.h"

#include <algorithm>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/io/checksum.h"
#include "pagoda/io/fault/fault_engine.h"

namespace pagoda::io {
namespace {

constexpr Bytes kPage = 4096;

std::vector<SwapFile> make_files(const SwapOptions& options, Bytes capacity) {
  PAGODA_REQUIRE(!options.directories.empty(), "a swap space needs at least one directory");
  PAGODA_REQUIRE(
      is_power_of_two(options.io_bytes) && options.io_bytes >= kPage && options.io_bytes <= 1_GiB,
      "io_bytes of {} must be a power of two from 4 KiB to 1 GiB", options.io_bytes);
  PAGODA_REQUIRE(options.stripe_bytes > 0 && options.stripe_bytes % options.io_bytes == 0,
                 "stripe_bytes of {} must be a multiple of io_bytes, {}", options.stripe_bytes,
                 options.io_bytes);
  PAGODA_REQUIRE(is_power_of_two(options.checksum_block) && options.checksum_block >= kPage &&
                     options.checksum_block <= options.io_bytes,
                 "checksum_block of {} must be a power of two from 4 KiB to io_bytes",
                 options.checksum_block);
  PAGODA_REQUIRE(options.depth > 0 && options.depth <= 4096, "depth of {} must be 1 to 4096",
                 options.depth);
  PAGODA_REQUIRE_GT(options.rings, 0U);
  const auto count = static_cast<unsigned>(options.directories.size());
  const StripeMap map(count, options.stripe_bytes);
  std::vector<SwapFile> files;
  files.reserve(count);
  for (unsigned i = 0; i < count; ++i) {
    files.emplace_back(options.directories[i], map.file_size(i, capacity),
                       SwapFile::Options{options.direct, options.preallocate});
  }
  return files;
}

}  // namespace

Volume::Volume(const SwapOptions& options, Bytes capacity)
    : files_(make_files(options, capacity)),
      map_(static_cast<unsigned>(files_.size()), options.stripe_bytes),
      checksums_(options.checksums),
      rings_(options.rings),
      locks_(options.io_bytes),
      bounce_(options.bounce_buffers, options.io_bytes) {
  Bytes align = 1;
  for (const SwapFile& file : files_) {
    direct_ = direct_ || file.direct();
    align = std::max(align, file.offset_alignment());
    memory_alignment_ = std::max(memory_alignment_, file.memory_alignment());
  }
  grid_ = {options.io_bytes, checksums_ ? options.checksum_block : align, align};
  for (const SwapFile& file : files_) {
    for (unsigned ring = 0; ring < rings_; ++ring) {
      auto engine = make_engine(options.engine, {.files = {file.fd()}, .depth = options.depth});
      engine->add_buffer(bounce_.memory());
      if (options.faults != nullptr) engine = make_fault_engine(std::move(engine), options.faults);
      engines_.push_back(std::move(engine));
    }
  }
  log::info("io", "swap space made",
            {{"bytes", capacity},
             {"files", files_.size()},
             {"directory", options.directories.front().string()},
             {"engine", engines_.front()->name()},
             {"direct", direct_},
             {"checksums", checksums_ ? checksum_target() : "off"}});
}

Volume::~Volume() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return transfers_ == 0; });
}

unsigned Volume::engine_index(Bytes position) const noexcept {
  const StripeMap::Place place = map_.place(position);
  return place.file * rings_ + static_cast<unsigned>((place.offset / grid_.cell) % rings_);
}

void Volume::transfer_began() noexcept {
  const std::lock_guard lock(mutex_);
  ++transfers_;
}

void Volume::transfer_ended() noexcept {
  const std::lock_guard lock(mutex_);
  if (--transfers_ == 0) idle_.notify_all();
}

}  // namespace pagoda::io

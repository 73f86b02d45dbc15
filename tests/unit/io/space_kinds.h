// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "pagoda/io/swap_space.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::io {

/// A kind of swap space that every promise is tested on.
struct SpaceKind {
  EngineChoice engine;
  Direct direct;
  bool checksums;
  std::size_t directories;

  std::string name() const {
    return std::string(engine == EngineChoice::Uring ? "uring" : "posix") +
           (direct == Direct::Off ? "Cached" : "Direct") + (checksums ? "Checked" : "Plain") +
           std::to_string(directories);
  }

  /// Small stripes and requests, so that small tests cross many of them.
  SwapOptions options(const ScratchDirectory& scratch, Bytes capacity) const {
    SwapOptions options;
    options.directories = scratch.disks(directories);
    options.capacity = capacity;
    options.stripe_bytes = 128_KiB;
    options.io_bytes = 64_KiB;
    options.checksum_block = 16_KiB;
    options.direct = direct;
    options.checksums = checksums;
    options.engine = engine;
    options.depth = 8;
    options.bounce_buffers = 3;
    return options;
  }
};

inline void PrintTo(const SpaceKind& kind, std::ostream* out) {
  *out << kind.name();
}

inline std::vector<SpaceKind> all_space_kinds() {
  std::vector<SpaceKind> kinds;
  for (const EngineChoice engine : {EngineChoice::Uring, EngineChoice::Posix}) {
    for (const Direct direct : {Direct::Auto, Direct::Off}) {
      for (const bool checksums : {true, false}) {
        for (const std::size_t directories : {1U, 3U}) {
          kinds.push_back({engine, direct, checksums, directories});
        }
      }
    }
  }
  return kinds;
}

inline std::string space_kind_name(const ::testing::TestParamInfo<SpaceKind>& info) {
  return info.param.name();
}

/// Whether the kernel lets this process use io_uring.
inline bool uring_allowed() {
  const ScratchDirectory scratch;
  const SwapFile file(scratch.path(), 4_KiB, {});
  try {
    make_engine(EngineChoice::Uring, {.files = {file.fd()}});
    return true;
  } catch (const EngineError&) {
    return false;
  }
}

/// In a test of a SpaceKind: leaves it, saying why, where its engine is refused.
#define PAGODA_SKIP_WITHOUT_ENGINE(kind)                                      \
  if ((kind).engine == ::pagoda::io::EngineChoice::Uring && !uring_allowed()) \
  GTEST_SKIP() << "io_uring is refused here"

inline std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> words(count / 8 + 1);
  for (std::uint64_t& word : words) word = random();
  std::vector<std::byte> bytes(count);
  if (count > 0) std::memcpy(bytes.data(), words.data(), count);
  return bytes;
}

}  // namespace pagoda::io

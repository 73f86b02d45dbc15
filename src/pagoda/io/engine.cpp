// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/engine.h"

#include "pagoda/base/log.h"
#include "pagoda/io/io_error.h"
#include "pagoda/io/posix/posix_engine.h"
#include "pagoda/io/uring/uring_engine.h"

namespace pagoda::io {

EngineChoice parse_engine(std::string_view name) {
  if (name == "auto") return EngineChoice::Auto;
  if (name == "uring") return EngineChoice::Uring;
  if (name == "posix") return EngineChoice::Posix;
  throw UserError(fmt::format("unknown I/O engine '{}': use auto, uring or posix", name));
}

std::unique_ptr<Engine> make_engine(EngineChoice choice, const Engine::Options& options) {
  PAGODA_REQUIRE(!options.files.empty());
  PAGODA_REQUIRE_GT(options.depth, 0U, "an I/O engine needs a queue depth");
  std::unique_ptr<Engine> engine;
  if (choice != EngineChoice::Posix) {
    int refused = 0;
    engine = make_uring_engine(options, refused);
    if (engine == nullptr && choice == EngineChoice::Uring) {
      throw EngineError(fmt::format("io_uring was refused: {}; allow it or choose the posix engine",
                                    errno_text(refused)),
                        {context("errno", refused)});
    }
    if (engine == nullptr) {
      log::warn("io", "io_uring was refused, using pread and pwrite on threads",
                {{"reason", errno_text(refused)}});
    }
  }
  if (engine == nullptr) engine = make_posix_engine(options);
  log::info(
      "io", "engine chosen",
      {{"engine", engine->name()}, {"depth", options.depth}, {"files", options.files.size()}});
  return engine;
}

}  // namespace pagoda::io

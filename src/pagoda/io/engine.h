// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "pagoda/io/request.h"

namespace pagoda::io {

/// Carries out requests on a fixed set of open files.
///
/// All members may be called from any thread, from within Request::complete() too. At most
/// `depth` requests are with the kernel; the others wait in the engine's queue, by priority.
/// Requests are unordered among each other. An engine reports what the kernel said and does not
/// judge it: short transfers and errors are its caller's. It must not be destroyed in a forked
/// child (io/owner_process.h).
class Engine {
 public:
  struct Options {
    std::vector<int> files;  ///< open descriptors; they outlive the engine
    unsigned depth = 32;
  };

  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  /// Completes everything submitted first.
  virtual ~Engine() = default;

  /// As logs should say it.
  virtual std::string_view name() const noexcept = 0;

  /// Starts or queues all of `requests`. Cannot fail: what goes wrong arrives at complete().
  virtual void submit(RequestList requests) noexcept = 0;

  /// Makes transfers to and from `memory` cheaper, until remove_buffer(); false where the engine
  /// or the kernel cannot. An optimisation only: any memory may be used.
  virtual bool add_buffer(std::span<std::byte> memory) = 0;
  /// Undoes add_buffer() of exactly this memory; it may be unmapped afterwards.
  virtual void remove_buffer(std::span<std::byte> memory) noexcept = 0;
};

enum class EngineChoice {
  Auto,   ///< io_uring, or posix where the kernel or the container refuses it
  Uring,  ///< io_uring, or an error
  Posix,  ///< pread and pwrite on a few threads
};

/// "auto", "uring" or "posix"; anything else is a UserError.
EngineChoice parse_engine(std::string_view name);

/// Makes the engine and logs which it became, and why.
std::unique_ptr<Engine> make_engine(EngineChoice choice, const Engine::Options& options);

}  // namespace pagoda::io

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/device/cuda/runtime.h"

namespace pagoda::device::cuda {

/// Some of a stream's host functions, by number: after `since`, up to and including `until`.
struct FunctionSpan {
  std::uint64_t since = 0;
  std::uint64_t until = 0;
};

/// The host functions of one stream, and the failures they have left.
///
/// CUDA has no way to say that a host function failed, so failures are kept here with the
/// function's number: an event knows which functions it covers, and so whether one of them failed.
/// A function object is destroyed by a later call into the stream, never on CUDA's own thread, for
/// its destructor may call CUDA. All members may be called from any thread; launches of one stream
/// come in the order of issue (under the stream's issue lock).
class HostFunctions : public std::enable_shared_from_this<HostFunctions> {
 public:
  explicit HostFunctions(std::string stream);
  HostFunctions(const HostFunctions&) = delete;
  HostFunctions& operator=(const HostFunctions&) = delete;
  ~HostFunctions();

  /// Runs `fn` in stream order, unless an earlier one has failed and nobody has taken that.
  void launch(cudaStream_t stream, std::string_view label, std::function<void()> fn);
  /// The functions that an event recorded now would cover.
  FunctionSpan covered() const;
  /// Whether all of them have finished well.
  bool succeeded(FunctionSpan span) const;
  /// The failure of one of them; null if none has failed so far.
  std::exception_ptr failure(FunctionSpan span) const;
  /// The failure since the last call, once; the stream then runs functions again.
  std::exception_ptr take_failure();
  /// Whether some have not finished.
  bool pending() const;
  /// Destroys those that have run.
  void destroy_finished();

 private:
  struct Call;
  struct Failure {
    std::uint64_t number = 0;
    std::exception_ptr error;
  };
  using Lock = RankedGuard<LockRank::CudaHostFunctions>;

  static void CUDART_CB run(void* call);
  std::exception_ptr failure(FunctionSpan span, const Lock&) const;

  const std::string stream_;
  mutable RankedMutex<LockRank::CudaHostFunctions> mutex_;
  std::uint64_t launched_ = 0;  // guarded by mutex_, as is all below
  std::uint64_t finished_ = 0;
  std::uint64_t taken_ = 0;                  // failures up to this number were rethrown
  std::vector<Failure> failures_;            // kept for events that cover them
  std::vector<std::unique_ptr<Call>> dead_;  // have run; for destroy_finished()
};

}  // namespace pagoda::device::cuda
